"""Which checkpoint a name means: a path, or ``best`` or ``last`` of a folder. The one place that resolves it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from ignite_engine.checkpoint import layout
from ignite_engine.checkpoint.manifest import MANIFEST_NAME, Manifest
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import CheckpointError, did_you_mean

Which = Literal["last", "best", "newest"]
"""The newest valid checkpoint of a folder, by either name, or the valid one with the best score."""
NAMES: tuple[str, ...] = get_args(Which)
RUNS_FOLDER = "checkpoints"


def check_which(which: str) -> None:
    """Refuse what is not a name.

    Raises:
        ValueError: one line.
    """
    if which not in NAMES:
        raise ValueError(f"which must be 'best' or 'last', got {which!r}.")


def split_name(path: str | Path, which: Which = "last") -> tuple[Path, Which]:
    """``runs/x/best`` as ``runs/x`` and ``best``, unless something of that very path is there; other paths as they are.

    Args:
        which: of a path that does not end with a name.
    """
    path = Path(path)
    if path.name in NAMES and not path.exists():
        return path.parent, path.name  # type: ignore[return-value]  # it is one of them
    return path, which


def is_single(path: Path) -> bool:
    """Whether a path is that of one checkpoint, or of a file of weights."""
    return path.is_file() or (path / MANIFEST_NAME).exists() or (path.exists() and _is_named_as_one(path))


def find_directory(path: str | Path) -> Path:
    """The folder of checkpoints that a path means: itself, or that of a run.

    Raises:
        CheckpointError: one line; there is none.
    """
    path = Path(path)
    if not path.exists():
        near = did_you_mean(path.name, ["best", "last"])
        hint = near if near.startswith("; did") else "."
        raise CheckpointError(f"{path} does not exist; expected a run's folder or a folder of checkpoints{hint}")
    for candidate in (path, path / RUNS_FOLDER):
        if any(layout.scan(candidate)):
            return candidate
    raise CheckpointError(f"{path} holds no checkpoint; expected a run's folder or a folder of checkpoints.")


def is_there(path: str | Path) -> bool:
    """Whether there is anything that :func:`find_source` could mean, valid or not."""
    path, _ = split_name(path)
    if path.is_dir() and not (path / MANIFEST_NAME).exists() and not _is_named_as_one(path):
        return any(map(any, map(layout.scan, (path, path / RUNS_FOLDER))))
    return path.exists()


def find_source(path: str | Path, which: Which = "last", *, metric: str | None = None, mode: str | None = None) -> Path:
    """The checkpoint or file that a path means; of a folder of checkpoints, or a run's, the last or the best valid one.

    Args:
        path: a file of weights, a checkpoint, or a folder; a folder may be followed by a name: ``runs/x/best``.
        which: of a folder without one.
        metric, mode: by which it is the best; None: as the run that saved it says.

    Raises:
        CheckpointError: one line; there is none, or none that is valid, or nothing says which is the best.
        ValueError: ``which`` is not a name, or only one of metric and mode is given.
    """
    check_which(which)
    place, which = split_name(path, which)
    if is_single(place):
        if which == "best":
            raise CheckpointError(f"{place} is one checkpoint: give the folder of its run to have the best of them.")
        return place
    store = CheckpointStore(find_directory(place))
    if which == "best":
        metric, mode = scored_by(store, metric, mode)
        best = store.best(metric, mode)
        if best is None:
            raise CheckpointError(f"{place} holds no valid checkpoint with {metric}.")
        return best.path
    newest = store.latest()
    if newest.checkpoint is None:
        reasons = "; ".join(f"{path.name}: {reason.rstrip('.')}" for path, reason in newest.skipped)
        raise CheckpointError(f"{place} holds no valid checkpoint ({reasons}).")
    return newest.checkpoint.path


def scored_by(store: CheckpointStore, metric: str | None = None, mode: str | None = None) -> tuple[str, str]:
    """Metric and mode by which the best is chosen: those given, or those that the run of the newest one followed.

    Raises:
        CheckpointError: neither is there.
        ValueError: only one is given.
    """
    if (metric is None) != (mode is None):
        raise ValueError(f"metric and mode say together which one is the best, got metric={metric!r}, mode={mode!r}.")
    if metric is not None and mode is not None:
        return metric, mode
    if (said := followed(store.checkpoints())) is None:
        raise CheckpointError(
            f"{store.directory}: no metric was followed, so none is the best; train with "
            "Checkpoint(best='val/loss', mode='min'), in a config best and mode of handlers.Checkpoint, or give metric "
            "and mode."
        )
    return said


def followed(checkpoints: Sequence[CheckpointInfo]) -> tuple[str, str] | None:
    """Metric and mode that the run of the newest checkpoint followed; None: it followed none."""
    return next(
        (rule for checkpoint in reversed(checkpoints) if (rule := rule_of(checkpoint.manifest)) is not None), None
    )


def rule_of(manifest: Manifest) -> tuple[str, str] | None:
    """Metric and mode by which the run kept its best; None: by none."""
    return None if manifest.best is None else (manifest.best["metric"], manifest.best["mode"])


def _is_named_as_one(path: Path) -> bool:
    return layout.named_iteration(path) is not None
