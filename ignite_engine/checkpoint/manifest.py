"""The manifest: describes a checkpoint; written last, read first."""

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
"""Cannot lead out of the checkpoint's directory, as ``../../other`` would."""
_Name = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]+\Z")]
"""The name of a part; printable, as it appears in one-line messages."""


class Best(TypedDict):
    """The metric by which a run keeps its best checkpoints, and whether a small or a large value is good."""

    metric: str
    mode: Literal["min", "max"]


class Facts(TypedDict, total=False):
    """Fields of the manifest that the caller of a save can set; see :class:`Manifest`."""

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
    """Everything known about a checkpoint without loading it. In the file, ``checksum`` covers all other fields."""

    iteration: _Count
    """The number of completed updates."""
    epoch: _Count
    sequence: _Count
    """The number of the save in this directory: the newest checkpoint has the largest, whatever its iteration."""
    metrics: dict[str, float]
    world_size: _Count
    config: dict[str, Any] | None
    """The run's configuration as JSON data."""
    versions: dict[str, str]
    """The versions of Python, torch, Ignite and this package."""
    files: dict[_FileName, FileRecord]
    parts: dict[_FileName, list[_Name]]
    """The names of the parts in each file."""
    created_at: str
    """UTC, ISO 8601."""
    reproducibility: list[str] = field(default_factory=list)
    """Reasons why a run resumed from here may not be bit-exact; empty: it is."""
    healthy: bool = True
    """Whether all weights are finite."""
    labels: list[str] = field(default_factory=list)
    parent: str | None = None
    """The previous checkpoint of this run, or the one that it was resumed from."""
    environment: dict[str, Any] = field(default_factory=dict)
    """The environment of rank 0: command, machine, threads, devices, sharding."""
    left_out: dict[_Name, list[str]] = field(default_factory=dict)
    """By part, the names that a filter has left out; no names: the whole part was left out."""
    kinds: dict[_Name, str] = field(default_factory=dict)
    """The kind of each part, from ``register(kind=...)``; a missing kind is inferred from the state."""
    best: Best | None = None
    evaluated_with: dict[str, str] = field(default_factory=dict)
    """By name of an evaluation, the average that replaced the weights in it; the others used the weights."""
    run_id: str | None = None
    """Identifies the run; a resumed run keeps it, a fresh start gets another one."""
    format_version: int = FORMAT_VERSION

    def weights_of(self, metric: str) -> str:
        """The weights for which a metric was measured: ``raw``, or the name of an average."""
        return self.evaluated_with.get(metric.rpartition("/")[0], "raw")

    @property
    def exact(self) -> bool:
        """Whether a run resumed from here ends with the same bits as one that was never interrupted."""
        return not self.reproducibility

    def to_json(self) -> bytes:
        """The content of the file, with its checksum."""
        content = asdict(self)
        content["metrics"] = {name: json_number(value) for name, value in self.metrics.items()}
        return (json.dumps({**content, "checksum": _checksum(content)}, indent=2) + "\n").encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        CheckpointError: one line; it is missing, damaged, or of another format version.
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
    """Parse the content of a manifest's file.

    Args:
        path: of the file, for error messages.

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
    """The configuration after a round trip through JSON, which turns tuples into lists.

    Raises:
        CheckpointError: it holds something that is not JSON data.
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
    """Versions of Python and the packages that matter; cached, do not change the result."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("ignite-engine", "pytorch-ignite"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "unknown"
    return versions
