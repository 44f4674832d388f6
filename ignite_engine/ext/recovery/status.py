"""Where each rank is in its run, in memory that outlives it: what its supervisor reads when it has died."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine.events import Phase
from ignite_engine.ranks import agreement, watch

_FIELDS = ("begun", "updates", "hung")
_ROW = 8 * len(_FIELDS)


def _number(name: str) -> Any:
    place = _FIELDS.index(name)
    return property(lambda row: row._numbers[place], lambda row, value: row._numbers.__setitem__(place, value))


class RankStatus:
    """What one rank writes and its supervisor reads.

    Attributes:
        begun: the newest iteration; 0: none.
        updates: since the rank was started.
        hung: one more than the rank that hangs, as the watch says; 0: none does.
    """

    begun = _number("begun")
    updates = _number("updates")
    hung = _number("hung")

    def __init__(self, row: memoryview) -> None:
        self._numbers = row.cast("q")

    @property
    def where(self) -> str:
        """Where the rank is, or was when it died: the end of a sentence."""
        return f"in iteration {self.begun}" if self.begun else "before its first iteration"

    def clear(self) -> None:
        for place in range(len(_FIELDS)):
            self._numbers[place] = 0


def shared_rows(ranks: int) -> list[RankStatus]:
    """A row for each rank, shared with the processes that are forked from this one, and gone with the last of them."""
    memory = memoryview(mmap.mmap(-1, ranks * _ROW))
    return [RankStatus(memory[rank * _ROW : (rank + 1) * _ROW]) for rank in range(ranks)]


@dataclass(frozen=True)
class Attempt:
    """What a supervisor tells the ranks that it starts.

    Attributes:
        reason: why they are started again, in one line; None: they are not.
        is_known: an attempt before it has trained with the same settings and code on as many ranks: what it has said
            of them, and written into the run's folder, holds.
    """

    reason: str | None = None
    is_known: bool = False


current: RankStatus | None = None
"""This process's, if it is a rank that a supervisor has started."""
attempt = Attempt()
"""Which this process takes part in."""


def supervised(row: RankStatus, told: Attempt) -> None:
    """In a rank that was forked: from here on it writes where it is into its row."""
    global current, attempt
    current, attempt = row, told
    watch.learned = _note_hang


def _note_hang(failure: watch.Failure) -> None:
    if current is not None and failure.kind in ("silent", "stuck"):
        current.hung = 1 + (failure.ranks[0] if failure.ranks else agreement.rank())


def follow(trainer: Engine) -> None:
    """Let the supervisor of this rank know where ``trainer`` is; nothing is attached where there is none."""
    if current is not None:
        _Follower(current).attach(trainer)


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
