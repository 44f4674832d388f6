"""Going back within a run: to the last healthy checkpoint, and on from there without the iteration that broke it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ignite_engine.errors import NotFinite, RollBack
from ignite_engine.loop.position import EpochIs
from ignite_engine.loop.progress import Progress
from ignite_engine.loop.start import RunArguments
from ignite_engine.state import TrainingState


class RollBacks:
    """What ``Update(non_finite="rollback")`` goes back by: a :class:`~ignite_engine.handlers.Checkpoint`'s function."""

    def __init__(self) -> None:
        self._load: Callable[[], Path | None] | None = None

    def load_with(self, load: Callable[[], Path | None]) -> None:
        """Let ``load`` bring back the last healthy checkpoint; the first one that is given counts."""
        self._load = self._load or load

    def check(self, policy: Any) -> None:
        """Refuse a run that could not go back.

        Raises:
            ValueError: the policy is ``rollback``, and nothing is given to go back by.
        """
        if policy is not None and policy.action == "rollback" and self._load is None:
            raise ValueError("non_finite='rollback' needs checkpoints to go back to: attach a Checkpoint before run().")

    def go_back(self, request: RollBack, policy: Any) -> Path:
        """Load the last healthy checkpoint; a collective. What is to be left out stays written down.

        Raises:
            NotFinite: there is no checkpoint.
        """
        journal = policy.journal
        assert self._load is not None  # check() has asked for it
        path = self._load()
        if path is None:
            raise NotFinite(
                f"{request}, and there is no healthy checkpoint to go back to: save one before, such as with "
                "Checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100)), or use non_finite='skip'."
            )
        policy.journal = policy.journal | journal
        return path


def arguments_again(arguments: RunArguments, state: TrainingState, progress: Progress) -> RunArguments:
    """The arguments with which a run begins again that went back: its data, its limits, and its epochs."""
    data = state.dataloader if arguments.data is None else arguments.data
    length = state.epoch_length if progress.epoch_is is EpochIs.A_LENGTH else None
    return RunArguments(data, state.max_epochs, state.max_iters, length)
