"""A run whose folder this machine has: its checkpoints are read, kept and annotated there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ignite_engine.checkpointing import CheckpointError, CheckpointInfo, CheckpointStore
from ignite_engine.checkpointing.in_use import in_use
from ignite_engine.followed_log import FollowedLog, missing_values
from ignite_engine.follower.life import LifeHere
from ignite_engine.ranks import agreement
from ignite_engine.run_directory import RunDirectory

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Here:
    """Where a follower finds a run, and leaves what it measures; see :class:`ignite_engine.follower.there.There`.

    Args:
        wait_s: seconds without a sign of life after which the run is given up.
    """

    look_every_s = 0.5

    def __init__(self, run: RunDirectory, wait_s: float) -> None:
        self.run, self.life = run, LifeHere(run, wait_s)
        self._held: dict[Path, contextlib.ExitStack] = {}

    def __str__(self) -> str:
        return str(self.run.given)

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        """What rank 0 answers, on all ranks; ``otherwise`` where the run cannot be reached now."""
        return agreement.on_rank_0(question)

    def saved(self) -> list[CheckpointInfo]:
        """All checkpoints, in the order in which they were saved."""
        return self._store().checkpoints()

    def _store(self) -> CheckpointStore:
        is_folder_of_its_own = self.run.checkpoints.is_dir() or not self.run.path.is_dir()
        return CheckpointStore(self.run.checkpoints if is_folder_of_its_own else self.run.path)

    def hold(self, checkpoint: CheckpointInfo) -> bool:
        """Keep retention from deleting it; False: it has been deleted."""
        if checkpoint.path not in self._held:
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(in_use(checkpoint.path)):
                    return False
                self._held[checkpoint.path] = stack.pop_all()
        return True

    def name_of(self, checkpoint: CheckpointInfo) -> str:
        """For people."""
        return str(checkpoint.path)

    def bring(self, checkpoint: CheckpointInfo) -> Path | None:
        """Where each rank can load it; a collective. None: it cannot be reached now."""
        return checkpoint.path

    def measured(self, checkpoint: CheckpointInfo, values: Mapping[str, float]) -> None:
        """Let the run know; a collective. What was measured is in the follower's log."""
        try:
            self._store().annotate(checkpoint.path, metrics=values)
        except CheckpointError as error:
            logger.warning("%s", error)

    def let_go(self, checkpoint: CheckpointInfo) -> None:
        """Let retention delete it."""
        if checkpoint.path in self._held:
            self._held.pop(checkpoint.path).close()

    def begin(self, log: FollowedLog) -> None:
        """Make up for what a follower that was killed has written to its log alone; a collective."""
        for checkpoint, values in agreement.on_rank_0(lambda: self._not_in_manifests(log)):
            self.measured(checkpoint, values)

    def _not_in_manifests(self, log: FollowedLog) -> list[tuple[CheckpointInfo, dict[str, float]]]:
        lines = log.lines()
        found = [(checkpoint, missing_values(checkpoint, lines)) for checkpoint in self.saved()]
        return [(checkpoint, values) for checkpoint, values in found if values]

    def end(self) -> None:
        """The run has ended, or is given up; a collective."""

    def release(self) -> None:
        """Let retention delete what was held."""
        for path in list(self._held):
            self._held.pop(path).close()
