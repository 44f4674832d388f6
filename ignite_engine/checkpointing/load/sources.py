"""A source to load from: where it is, which of its checkpoints, what is taken from it, and whether it must be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Literal

from ignite_engine.checkpointing.load.plan import LoadPlan
from ignite_engine.checkpointing.store import CheckpointStore
from ignite_engine.checkpointing.weights_source import find_directory, find_source, is_there
from ignite_engine.errors import CheckpointError, check_type


@dataclass(frozen=True)
class LoadSource:
    """One of the sources of a list, of which the last that has a name brings it.

    Args:
        path: a checkpoint, a folder of checkpoints or of a run, or a file of weights (safetensors, or a state_dict of
            ``torch.save``).
        plan: what is taken from it, and under which names: by default the model.
        which: of a folder the ``newest`` valid checkpoint or the ``best`` one.
        metric, mode: by which it is the best, and whether ``min`` or ``max`` is good; None: as the run that saved them
            says.
        optional: it may be missing; one that is there must be valid.

    Raises:
        TypeError, ValueError: a value is of another type, or is not one of those above.
    """

    path: str | Path
    plan: LoadPlan = field(default_factory=LoadPlan.fine_tune)
    which: Literal["newest", "best"] = "newest"
    metric: str | None = None
    mode: Literal["min", "max"] | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        check_type("path", self.path, bool(self.path) and isinstance(self.path, str | PathLike), "a path")
        check_type("plan", self.plan, isinstance(self.plan, LoadPlan), "a LoadPlan")
        check_type("optional", self.optional, isinstance(self.optional, bool), "True or False")
        if self.which not in ("newest", "best"):
            raise ValueError(f"which must be 'newest' or 'best', got {self.which!r}.")
        if self.mode not in (None, "min", "max"):
            raise ValueError(f"mode must be 'min', 'max' or None, got {self.mode!r}.")
        if (self.metric is None) != (self.mode is None) or (self.metric is not None and self.which != "best"):
            raise ValueError(
                f"metric and mode say together which checkpoint is the best, got metric={self.metric!r}, "
                f"mode={self.mode!r} and which={self.which!r}."
            )

    def find(self) -> Path | None:
        """The checkpoint or file that is meant now; None: it is optional and there is none.

        Raises:
            CheckpointError: one line; there is none, or none that is valid.
        """
        if self.optional and not is_there(self.path):
            return None
        if self.which == "newest":
            return find_source(self.path)
        store = CheckpointStore(find_directory(self.path))
        by = self.scored_by(store)
        if by is None:
            raise CheckpointError(
                f"{self.path}: no checkpoint says by what it is the best; give metric and mode, such as 'val/loss' and "
                "'min'."
            )
        best = store.best(*by)
        if best is None and not self.optional:
            raise CheckpointError(f"{self.path} holds no valid checkpoint with {by[0]}.")
        return best.path if best else None

    def scored_by(self, store: CheckpointStore) -> tuple[str, str] | None:
        """Metric and mode by which the best is chosen; None: none is known."""
        if self.metric is not None and self.mode is not None:
            return self.metric, self.mode
        said = next((each.manifest.best for each in reversed(store.checkpoints()) if each.manifest.best), None)
        return (said["metric"], said["mode"]) if said else None


def load_sources(path: str | Path | Sequence[LoadSource], plan: LoadPlan | None) -> list[LoadSource]:
    """The sources that are meant by one path and its plan, or by a list of them.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if isinstance(path, str | PathLike):
        check_type("plan", plan, plan is not None, "a LoadPlan beside a path")
        return [LoadSource(path, plan)]  # type: ignore[arg-type]  # checked
    sources = list(path)
    if plan is not None or not sources or not all(isinstance(each, LoadSource) for each in sources):
        raise ValueError("Give a path and its plan, or a list of LoadSource, each of which has its own plan.")
    return sources
