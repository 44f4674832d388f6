"""The one reader of everything that weights can come from: a checkpoint, a folder of them, or a file of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ignite_engine.checkpointing import layout as names
from ignite_engine.checkpointing.manifest import MANIFEST_NAME, Manifest
from ignite_engine.checkpointing.part_file import load_plain
from ignite_engine.checkpointing.store import CheckpointStore
from ignite_engine.errors import CheckpointError, one_line

_RUNS_FOLDER = "checkpoints"


@dataclass(frozen=True)
class Source:
    """Verified parts on the CPU, from wherever they came."""

    path: Path
    parts: dict[str, Any]
    """By name. A file of weights has one, ``model``."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    manifest: Manifest | None = None
    """None for a file of weights."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """What each part is, as far as it is known."""
        return self.manifest.kinds if self.manifest else {"model": "model"}


def find_directory(path: str | Path) -> Path:
    """The folder of checkpoints that a path means: itself, or that of a run.

    Raises:
        CheckpointError: one line; there is none.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected a run's folder or a folder of checkpoints.")
    for candidate in (path, path / _RUNS_FOLDER):
        if any(names.scan(candidate)):
            return candidate
    raise CheckpointError(f"{path} holds no checkpoint; expected a run's folder or a folder of checkpoints.")


def is_there(path: str | Path) -> bool:
    """Whether there is anything that :func:`find_source` could mean, valid or not."""
    path = Path(path)
    if path.is_dir() and not (path / MANIFEST_NAME).exists() and names.named_iteration(path) is None:
        return any(map(any, map(names.scan, (path, path / _RUNS_FOLDER))))
    return path.exists()


def find_source(path: str | Path) -> Path:
    """The checkpoint or file that a path means; of a folder of checkpoints, or a run's, the newest valid one.

    Raises:
        CheckpointError: one line; there is none, or none that is valid.
    """
    path = Path(path)
    if path.is_file() or (path / MANIFEST_NAME).exists() or (path.exists() and names.named_iteration(path) is not None):
        return path
    newest = CheckpointStore(find_directory(path)).latest()
    if newest.checkpoint is None:
        reasons = "; ".join(f"{each.name}: {reason.rstrip('.')}" for each, reason in newest.skipped)
        raise CheckpointError(f"{path} holds no valid checkpoint ({reasons}).")
    return newest.checkpoint.path


def read_source(path: Path, rank: int = 0, *, mmap: bool = False, whole: bool = True) -> Source:
    """Read what :func:`find_source` found; each file of a checkpoint is verified first.

    A rank that did not exist when a checkpoint was saved gets rank 0's own parts, but not its random numbers.

    Args:
        path: a checkpoint's directory, a file of ``safetensors``, or one of ``torch.save`` that holds a state_dict.
        rank: whose parts.
        mmap, whole: see :meth:`CheckpointStore.load`.

    Raises:
        CheckpointError: one line; missing, damaged, or not plain data (nothing was executed).
    """
    if path.is_file():
        return Source(path, {"model": _read_weights(path)})
    store = CheckpointStore(path.parent)
    loaded = store.load(path, rank, mmap=mmap, whole=whole)
    local = loaded.local
    if not local and rank:
        local = store.load(path, 0, mmap=mmap, whole=whole).local
        local = {name: part for name, part in local.items() if name != "rng"}
    return Source(path, {**loaded.shared, **local}, loaded.manifest.left_out, loaded.manifest)


def safetensors_torch() -> Any:
    """The module ``safetensors.torch``.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError("The format safetensors needs a package: pip install safetensors.") from None
    return safetensors.torch


def _read_weights(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        reader = safetensors_torch()
        try:
            return dict(reader.load_file(path))
        except Exception as error:  # of the Rust library
            raise CheckpointError(f"{path} is not a safetensors file: {one_line(error)}.") from error
    weights = load_plain(path, None, mmap=False)
    if not weights or not all(isinstance(each, torch.Tensor) for each in weights.values()):
        raise CheckpointError(f"{path} does not hold a plain state_dict: expected a mapping of names to tensors.")
    return weights
