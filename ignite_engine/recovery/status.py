"""Where each rank is in its run, in memory that outlives it: what its supervisor reads when it has died."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ignite.engine import Engine, Events

from ignite_engine.errors import shortened
from ignite_engine.events import Phase
from ignite_engine.ranks import agreement, watching

if TYPE_CHECKING:
    from ignite_engine.ranks.heartbeats import Failure

_FIELDS = ("begun", "phase", "updates", "first_update_ns", "suspect", "hung")
_TEXT = 2048
_ROW = 8 * len(_FIELDS) + _TEXT
_LENGTH = struct.Struct("H")
_READING, _TRAINING, _AFTER = 1, 2, 3
_WHERE = (
    "before its first iteration",
    "reading the data of iteration {}",
    "in iteration {}",
    "after the update of iteration {}",
)
_SAMPLES = 64


def _number(name: str) -> Any:
    place = _FIELDS.index(name)
    return property(lambda row: row._numbers[place], lambda row, value: row._numbers.__setitem__(place, value))


class RankStatus:
    """What one rank writes and its supervisor reads.

    Attributes:
        begun: the newest iteration; 0: none.
        updates: since the rank was started.
        first_update_ns: when the first of them was done, since the epoch.
        suspect: the iteration at which the rank died before, for it to name its samples there; 0: none.
        hung: one more than the rank that hangs, as the watch says; 0: none does.
    """

    begun = _number("begun")
    phase = _number("phase")
    updates = _number("updates")
    first_update_ns = _number("first_update_ns")
    suspect = _number("suspect")
    hung = _number("hung")

    def __init__(self, row: memoryview) -> None:
        self._numbers = row[: 8 * len(_FIELDS)].cast("q")
        self._text = row[8 * len(_FIELDS) :]

    @property
    def where(self) -> str:
        """Where the rank is, or was when it died: the end of a sentence."""
        return _WHERE[self.phase].format(self.begun)

    @property
    def samples(self) -> str:
        """The samples of the suspect's batch."""
        (length,) = _LENGTH.unpack_from(self._text)
        return bytes(self._text[_LENGTH.size :][:length]).decode(errors="replace")

    @samples.setter
    def samples(self, value: str) -> None:
        data = value.encode()[: _TEXT - _LENGTH.size]
        self._text[_LENGTH.size :][: len(data)] = data
        _LENGTH.pack_into(self._text, 0, len(data))

    def clear(self) -> None:
        for place in range(len(_FIELDS)):
            self._numbers[place] = 0
        self.samples = ""


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
        needs_invariance: the run may continue on fewer ranks.
    """

    reason: str | None = None
    is_known: bool = False
    needs_invariance: bool = False


current: RankStatus | None = None
"""This process's, if it is a rank that a supervisor has started."""
attempt = Attempt()
"""Which this process takes part in."""


def supervised(local_rank: int, row: RankStatus, told: Attempt, func: Any, args: Any, kwargs: Any) -> None:
    """In a rank that was forked: call ``func(local_rank, ...)``, and write where it is into its row."""
    global current, attempt
    current, attempt = row, told
    watching.learned = _note_hang
    func(local_rank, *args, **kwargs)


def _note_hang(failure: Failure) -> None:
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
        trainer.add_event_handler(Events.STARTED, self.check)
        trainer.add_event_handler(Events.GET_BATCH_STARTED, self.reading)
        trainer.add_event_handler(Events.ITERATION_STARTED, self.training)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self.done)

    def check(self, trainer: Any) -> None:
        """On STARTED.

        Raises:
            ValueError: the run may continue on fewer ranks, and would not have the same bits there.
        """
        if attempt.needs_invariance and not getattr(trainer.update, "rank_invariant", False):
            raise ValueError(
                "min_ranks continues a run on fewer ranks, to the same bits: it needs Update(rank_invariant=True), in "
                "a config update.rank_invariant. Set that, or leave min_ranks out."
            )

    def reading(self, trainer: Any) -> None:
        self._begin(trainer, trainer.state.iteration + 1, _READING)

    def training(self, trainer: Any) -> None:
        self._begin(trainer, trainer.state.iteration, _TRAINING)

    def done(self, trainer: Any) -> None:
        self.row.phase = _AFTER
        self.row.updates += 1
        if self.row.updates == 1:
            self.row.first_update_ns = time.time_ns()

    def _begin(self, trainer: Any, iteration: int, phase: int) -> None:
        row = self.row
        if iteration == row.suspect and (samples := trainer.progress.samples_of_group()) is not None:
            row.samples = shortened(map(str, samples), _SAMPLES)
        row.begun, row.phase = iteration, phase
