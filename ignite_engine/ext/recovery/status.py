"""Where each rank is in its run, in memory that outlives it: what its supervisor reads when it has died."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine.events import Phase
from ignite_engine.ranks import agreement, attempt, watch
from ignite_engine.trainer import attached_to_each


class RankStatus(ctypes.Structure):
    """What one rank writes and its supervisor reads.

    Attributes:
        begun: the newest iteration; 0: none.
        updates: since the rank was started.
        hung: one more than the rank that hangs, as the watch says; 0: none does.
    """

    _fields_ = [("begun", ctypes.c_int64), ("updates", ctypes.c_int64), ("hung", ctypes.c_int64)]
    begun: int
    updates: int
    hung: int

    @property
    def where(self) -> str:
        """Where the rank is, or was when it died: the end of a sentence."""
        return f"in iteration {self.begun}" if self.begun else "before its first iteration"

    def clear(self) -> None:
        self.begun = self.updates = self.hung = 0


def shared_rows(ranks: int) -> list[RankStatus]:
    """A row for each rank, shared with the processes that are forked from this one, and gone with the last of them."""
    size = ctypes.sizeof(RankStatus)
    memory = mmap.mmap(-1, ranks * size)
    return [RankStatus.from_buffer(memory, rank * size) for rank in range(ranks)]


current: RankStatus | None = None
"""This process's, if it is a rank that a supervisor has started."""


def supervised(row: RankStatus, told: attempt.Attempt) -> None:
    """In a rank that was forked: from here on it writes where it is into its row."""
    global current
    current, attempt.current = row, told
    watch.learned = _note_hang
    attached_to_each.append(_Follower(row).attach)


def _note_hang(failure: watch.Failure) -> None:
    if current is not None and failure.kind == "lost":
        current.hung = 1 + (failure.ranks[0] if failure.ranks else agreement.rank())


class _Follower:
    phase = Phase.PREPARE

    def __init__(self, row: RankStatus) -> None:
        self.row = row

    def attach(self, trainer: Engine) -> None:
        trainer.add_event_handler(Events.GET_BATCH_STARTED, self.reading)
        trainer.add_event_handler(Events.ITERATION_STARTED, self.training)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self.done)

    def reading(self, trainer: Any) -> None:
        self.row.begun = trainer.state.iteration + 1

    def training(self, trainer: Any) -> None:
        self.row.begun = trainer.state.iteration

    def done(self, trainer: Any) -> None:
        self.row.updates += 1
