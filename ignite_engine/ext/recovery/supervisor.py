"""A parent that forks its ranks, and forks them again when one has died."""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from ignite.engine import Engine, Events
from torch.multiprocessing.spawn import ProcessExitedException

from ignite_engine import devices
from ignite_engine.errors import check_type, is_whole
from ignite_engine.ext.recovery.forking import ready_to_fork
from ignite_engine.ranks import agreement, attempt, signals, watch
from ignite_engine.ranks.attempt import Attempt
from ignite_engine.ranks.joining import Work
from ignite_engine.ranks.launch import Ranks
from ignite_engine.trainer import attached_to_each

logger = logging.getLogger(__name__)

_HOUR_S = 3600.0
_STOPPED = frozenset(128 + signals.treated_as(stop) for stop in signals.STOPS)


class RankStatus(ctypes.Structure):
    """The progress of one rank, in memory shared with the supervisor.

    Attributes:
        begun: the newest iteration that has begun; 0: none.
        hung: one more than the rank that the watch found hanging; 0: none.
    """

    _fields_ = [("begun", ctypes.c_int64), ("hung", ctypes.c_int64)]
    begun: int
    hung: int


class _ForkedRanks(Ranks):
    """Ranks that are all killed when one has died, as they continue from what is saved."""

    def __init__(self, backend: str | None, count: int, timeout: timedelta | None) -> None:
        super().__init__(backend, count, timeout, "fork")
        size = ctypes.sizeof(RankStatus)
        memory = mmap.mmap(-1, count * size)
        self.rows = [RankStatus.from_buffer(memory, rank * size) for rank in range(count)]
        self.ended = False
        """Whether the ranks were killed here because one of them had died."""

    def attempt(self, work: Work, **environment: object) -> None:
        self.ended = False
        for row in self.rows:
            row.begun = row.hung = 0
        super().attempt(work, **environment)

    def _end_peers(self, failed_s: float) -> None:
        if self.stop is None and (self.killed or any(row.hung for row in self.rows)):
            self.ended = True
            self._kill()
        else:
            super()._end_peers(failed_s)

    def deaths(self) -> dict[int, int | None]:
        """By rank, the signal that has killed it, or None for a hanging rank; empty for a run that was stopped."""
        if any(code in _STOPPED for code in self.codes):
            return {}
        return {**self.killed} or dict([(row.hung - 1, None) for row in self.rows if row.hung][:1])

    def line(self, rank: int, number: int | None) -> str:
        how = "hangs" if number is None else f"was killed by {signals.name_of(number)}"
        begun = self.rows[rank].begun
        where = f"in iteration {begun}" if begun else "before its first iteration"
        return f"Rank {rank} (process {self.processes[rank].pid}) {how} {where}"


class Supervisor:
    """Forks the ranks, waits, and forks them again: what ``Parallel(restarts=n)`` does.

    This process forks the ranks, also where there is one of them. It has imported what they need and must not have used
    an accelerator. When a rank is killed all others are killed at once, which what they were saving survives, and the
    ranks are forked again. An iteration at which a rank dies twice is named and ends the run. A stop that the ranks
    have agreed on ends it, too. Under a launcher such as torchrun, which has restarts of its own, it has no effect.

    Args:
        restarts: the maximum number in an hour.

    Raises:
        TypeError: ``restarts`` is no whole number.
        ValueError: ``restarts`` is less than 1.
    """

    def __init__(self, restarts: int) -> None:
        check_type("restarts", restarts, is_whole(restarts), "a whole number, of an hour")
        if restarts < 1:
            raise ValueError(f"restarts must be at least 1, got {restarts}; leave it out for none.")
        devices.look_without_using()
        self._allowed = restarts
        self._restarted_at: deque[float] = deque(maxlen=restarts)
        self._restarts = 0
        self._died_at: dict[int, int] = {}
        """By rank, the iteration at which it died last, until it gets beyond it."""

    def run(self, backend: str | None, count: int, timeout: timedelta | None, work: Work) -> None:
        """Call ``work(local_rank)`` on every rank until it has ended there.

        Args:
            backend, count, timeout: as for :class:`~ignite_engine.ranks.launch.Ranks`.

        Raises:
            LaunchError: this process cannot fork ranks.
            ProcessExitedException: (torch's) a rank died and is not restarted; the message says why.
        """
        told, ranks = Attempt(), _ForkedRanks(backend, count, timeout)
        with ready_to_fork(), ranks.passing_signals_on():
            while True:
                in_rank = partial(_in_rank, ranks.rows, told, work)
                ranks.attempt(in_rank, TORCHELASTIC_RESTART_COUNT=self._restarts)
                deaths = ranks.deaths()
                if not deaths or (ranks.stop is not None and not ranks.ended):
                    ranks.finish()
                    return
                self._count(ranks, deaths)
                lines = "; ".join(ranks.line(rank, number) for rank, number in deaths.items())
                why = f"{lines}. Restart {self._restarts}, of at most {self._allowed} in an hour."
                logger.warning("%s", why)
                told = Attempt(why, told.is_known or any(row.begun for row in ranks.rows))
                if ranks.stop is not None:
                    sys.exit(128 + signals.treated_as(ranks.stop))

    def _count(self, ranks: _ForkedRanks, deaths: Mapping[int, int | None]) -> None:
        """Record how an attempt has ended.

        Raises:
            ProcessExitedException: another attempt would fail, too.
        """
        for rank, number in deaths.items():
            if ranks.rows[rank].begun and ranks.rows[rank].begun == self._died_at.get(rank):
                _give_up(ranks, rank, number, ", where it died before. The run ends, as it would end there again.")
        now = time.monotonic()
        if len(self._restarted_at) == self._allowed and now - self._restarted_at[0] < _HOUR_S:
            times = "once" if self._allowed == 1 else f"{self._allowed} times"
            _give_up(
                ranks, *next(iter(deaths.items())), f". The run ends: it was started again {times} within an hour."
            )
        self._restarted_at.append(now)
        self._restarts += 1
        for rank, row in enumerate(ranks.rows):
            if row.begun and (rank in deaths or row.begun > self._died_at.get(rank, 0)):
                self._died_at[rank] = row.begun if rank in deaths else 0


def _in_rank(rows: Sequence[RankStatus], told: Attempt, work: Work, local_rank: int) -> None:
    """Let the rank report its progress to the supervisor."""
    row = rows[agreement.rank()]

    def note_hang(failure: watch.Failure) -> None:
        if failure.kind == "lost":
            row.hung = 1 + (failure.ranks[0] if failure.ranks else agreement.rank())

    def note_iteration(trainer: Any, ahead: int) -> None:
        row.begun = trainer.state.iteration + ahead

    def attach(trainer: Engine) -> None:
        trainer.add_event_handler(Events.GET_BATCH_STARTED, note_iteration, 1)
        trainer.add_event_handler(Events.ITERATION_STARTED, note_iteration, 0)

    attempt.current, watch.learned = told, note_hang
    attached_to_each.append(attach)
    work(local_rank)


def _give_up(ranks: _ForkedRanks, rank: int, number: int | None, reason: str) -> NoReturn:
    name, code = (None, 1) if number is None else (signals.name_of(number), -number)
    text = ranks.line(rank, number) + reason
    raise ProcessExitedException(text, rank, ranks.processes[rank].pid, exit_code=code, signal_name=name)
