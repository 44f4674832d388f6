"""The manifest: what a checkpoint is, written last, read first."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints

import torch

from ignite_engine.checkpoint.filesystem import HASHES, FileRecord, open_regular
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.text import json_number

FORMAT_VERSION = 7
OLDEST_READABLE_VERSION = 7
MANIFEST_NAME = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Facts(TypedDict, total=False):
    """Fields of the manifest that whoever saves can give; see :class:`Manifest`."""

    metrics: Mapping[str, Any] | None
    config: Mapping[str, Any] | None
    reproducibility: Sequence[str]
    healthy: bool
    labels: Sequence[str]
    parent: str | None
    left_out: Mapping[str, Sequence[str]]
    kinds: Mapping[str, str]
    best: Mapping[str, str] | None
    evaluated_with: Mapping[str, str]
    run_id: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that is known of a checkpoint without loading it. In the file, ``checksum`` covers all the rest."""

    iteration: int
    """Updates done when it was saved."""
    epoch: int
    sequence: int
    """The place in the order of saves of this directory: the newest has the largest, whatever its iteration."""
    metrics: dict[str, float]
    world_size: int
    config: dict[str, Any] | None
    """The run's configuration, as JSON can hold it."""
    versions: dict[str, str]
    """The versions of Python, torch, Ignite and this package."""
    files: dict[str, FileRecord]
    parts: dict[str, list[str]]
    """File name to the names of the parts in it."""
    created_at: str
    """UTC, ISO 8601."""
    reproducibility: list[str] = field(default_factory=list)
    """Why a run resumed from here may differ in its bits; empty: it will not."""
    healthy: bool = True
    """No non-finite weight."""
    labels: list[str] = field(default_factory=list)
    parent: str | None = None
    """Name of the checkpoint that this run saved before it, or was resumed from."""
    environment: dict[str, Any] = field(default_factory=dict)
    """What rank 0 ran with: command, machine, threads, devices, meshes and placements of its tensors."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Names inside parts that a filter left out, by part; a part without names was left out whole."""
    kinds: dict[str, str] = field(default_factory=dict)
    """What each part is, as ``register(kind=...)`` said; a part that is not in it is guessed from its state."""
    best: dict[str, str] | None = None
    """The ``metric`` by which the run keeps its best ones, and its ``mode``, ``min`` or ``max``; None: by none."""
    evaluated_with: dict[str, str] = field(default_factory=dict)
    """The part of the average that took the place of the weights, by the name of the evaluation; others have none."""
    run_id: str | None = None
    """The same for all checkpoints of a run, however often it was resumed; another one for each fresh start."""
    format_version: int = FORMAT_VERSION

    def weights_of(self, metric: str) -> str:
        """The weights with which a metric was measured: ``raw``, or the part of an average."""
        return self.evaluated_with.get(metric.rpartition("/")[0], "raw")

    @property
    def exact(self) -> bool:
        """A run resumed from here ends with the same bits as one never interrupted."""
        return not self.reproducibility

    def to_json(self) -> bytes:
        """The manifest with its checksum, for people to read too."""
        content = asdict(self)
        content["metrics"] = {name: json_number(value) for name, value in self.metrics.items()}
        return (json.dumps({**content, "checksum": _checksum(content)}, indent=2) + "\n").encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        CheckpointError: one line; missing, broken, or of a format version that this release cannot read.
    """
    path = directory / MANIFEST_NAME
    try:
        with open_regular(path) as file:
            text = file.read()
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {MANIFEST_NAME}: it is not a committed checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}.") from error
    return parse_manifest(path, text)


def parse_manifest(path: str | Path, text: bytes) -> Manifest:
    """The manifest in the bytes of its file.

    Args:
        path: of the file, for messages.

    Raises:
        CheckpointError: as :func:`read_manifest`.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 alike
        raise CheckpointError(f"{path} is damaged: it is not JSON ({one_line(error)}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(content).__name__}, not an object.")
    _check_version(path, content.get("format_version"))
    checksum = content.pop("checksum", None)
    if checksum != _checksum(content):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum.")
    return _parse(path, content)


def _check_version(path: str | Path, version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool):
        raise CheckpointError(f"{path} is damaged: its format_version is {version!r}, expected a whole number.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this release reads up to {FORMAT_VERSION}: update ignite_engine."
        )
    if version < OLDEST_READABLE_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this release reads from {OLDEST_READABLE_VERSION}: "
            "load it with the release that wrote it."
        )


def _parse(path: str | Path, content: dict[str, Any]) -> Manifest:
    hints = _type_hints(Manifest)
    try:
        values = {name: value for name, value in content.items() if name in hints}
        values["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
        values["metrics"] = {name: float(value) for name, value in content["metrics"].items()}
        manifest = Manifest(**values)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {one_line(error)}.") from error
    for name, hint in hints.items():
        if not _fits(getattr(manifest, name), hint):
            raise CheckpointError(f"{path} is damaged: its {name} has a value of another type than it must have.")
    if min(manifest.iteration, manifest.epoch, manifest.sequence, manifest.world_size) < 0:
        raise CheckpointError(f"{path} is damaged: one of its counts is negative.")
    if manifest.best is not None and set(manifest.best) != {"metric", "mode"}:
        raise CheckpointError(f"{path} is damaged: its best is not a metric and a mode.")
    for name in manifest.files:  # such as ../../other, which must never lead out of the checkpoint
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{path} is damaged: {name!r} is not the name of a file beside it.")
    for record in manifest.files.values():
        if record.algorithm not in HASHES:
            raise CheckpointError(
                f"{path} names the hash {record.algorithm!r}, this release knows {', '.join(HASHES)}: "
                "update ignite_engine."
            )
    for name in chain(*manifest.parts.values(), manifest.left_out, manifest.kinds):
        if not name.isprintable():  # each is a part of messages of one line
            raise CheckpointError(f"{path} is damaged: {name!r} is not the name of a part.")
    return manifest


@cache
def _type_hints(kind: type) -> dict[str, Any]:
    """Type hints by name, compiled once."""
    return get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type made of JSON's, dataclasses, lists, dicts and unions."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:
        return any(_fits(value, option) for option in inside)
    if kind is Any or type(value) is not kind:
        return kind is Any
    if kind is list:
        return all(_fits(item, inside[0]) for item in value)
    if kind is dict:
        return all(type(key) is str and _fits(item, inside[1]) for key, item in value.items())
    names = _type_hints(kind).items() if is_dataclass(kind) else ()
    return all(_fits(getattr(value, name), inner) for name, inner in names)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as floats.

    Raises:
        CheckpointError: one of them is not a number.
    """
    numbers: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"Metric {name!r} is {type(value).__name__}, expected a number.") from error
    return numbers


def plain_config(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The configuration as JSON gives it back (tuples are lists then).

    Raises:
        CheckpointError: it holds something that JSON does not have.
    """
    if config is None:
        return None
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(config)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The config of a checkpoint must be plain JSON data: {one_line(error)}.") from error
    return plain


@cache
def current_versions() -> dict[str, str]:
    """Versions that a resumed run may want to compare; not to be changed."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("ignite-engine", "pytorch-ignite"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "unknown"
    return versions
