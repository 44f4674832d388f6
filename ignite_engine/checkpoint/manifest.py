"""The manifest: what a checkpoint is, written last, read first."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import torch

from ignite_engine.checkpoint.filesystem import FileRecord, open_regular
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.text import json_number

FORMAT_VERSION = 7
MANIFEST_NAME = "manifest.json"
_Count = Annotated[int, msgspec.Meta(ge=0)]
_FileName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")]
"""It never leads out of the checkpoint, as ``../../other`` would."""
_Name = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]+\Z")]
"""Of a part: messages of one line have it."""


class Best(TypedDict):
    """By which metric a run keeps its best checkpoints, and whether ``min`` or ``max`` is good."""

    metric: str
    mode: Literal["min", "max"]


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
    best: Best | None
    evaluated_with: Mapping[str, str]
    run_id: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that is known of a checkpoint without loading it. In the file, ``checksum`` covers all the rest."""

    iteration: _Count
    """Updates done when it was saved."""
    epoch: _Count
    sequence: _Count
    """The place in the order of saves of this directory: the newest has the largest, whatever its iteration."""
    metrics: dict[str, float]
    world_size: _Count
    config: dict[str, Any] | None
    """The run's configuration, as JSON can hold it."""
    versions: dict[str, str]
    """The versions of Python, torch, Ignite and this package."""
    files: dict[_FileName, FileRecord]
    parts: dict[_FileName, list[_Name]]
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
    left_out: dict[_Name, list[str]] = field(default_factory=dict)
    """Names inside parts that a filter left out, by part; a part without names was left out whole."""
    kinds: dict[_Name, str] = field(default_factory=dict)
    """What each part is, as ``register(kind=...)`` said; a part that is not in it is guessed from its state."""
    best: Best | None = None
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
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r}, this one reads {FORMAT_VERSION}: use the release that wrote it."
        )
    checksum = content.pop("checksum", None)
    if checksum != _checksum(content):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum.")
    try:
        metrics = {name: float(value) for name, value in content["metrics"].items()}
        return msgspec.convert(content | {"metrics": metrics}, Manifest)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {one_line(error)}.") from error


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
