"""A parent that forks its ranks, and forks them again when one has died: the run takes back a step, not its start."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NoReturn

from torch.multiprocessing.spawn import ProcessExitedException

from ignite_engine.ext.recovery.forking import ready_to_fork
from ignite_engine.ext.recovery.status import Attempt, RankStatus, shared_rows, supervised
from ignite_engine.ranks import agreement, signals
from ignite_engine.ranks.joining import Work
from ignite_engine.ranks.launch import Ranks, receiving_signals

logger = logging.getLogger(__name__)

_HOUR_S = 3600.0
_STOPPED = frozenset(128 + signals.treated_as(stop) for stop in signals.STOPS)


@dataclass(frozen=True)
class _Death:
    """A rank that has died or hangs.

    Attributes:
        how: as the end of a sentence about it, with the iteration.
        begun: that iteration; 0: none had begun.
        number: of the signal that killed it; None: it hangs.
    """

    rank: int
    pid: int
    how: str
    begun: int
    number: int | None = None

    @property
    def line(self) -> str:
        return f"Rank {self.rank} (process {self.pid}) {self.how}"


class _ForkedRanks(Ranks):
    """Ranks of which all are killed when one has died, as they go on from what is saved."""

    rows: Sequence[RankStatus] = ()
    ended = False
    """They were killed here because one of them had died."""

    def _end_peers(self) -> None:
        if self.stop is None and (self.killed or any(row.hung for row in self.rows)):
            self.ended = True
            self._kill()
        else:
            super()._end_peers()

    @property
    def killed(self) -> list[int]:
        """Those that a signal has ended which asks for no stop, and which this process has not sent."""
        killed = [rank for rank in self.ranks if rank.killed_by and rank.end and rank.end.code is None]
        return [rank.number for rank in killed if not self.has_aborted_for_a_peer(rank)]

    @property
    def stopped(self) -> bool:
        """The ranks have agreed to end the run before its end."""
        return any(rank.end is not None and rank.end.code in _STOPPED for rank in self.ranks)

    def deaths(self) -> list[_Death]:
        """Of ranks that were killed, or else the one that hangs."""
        if killed := self.killed:
            numbers = {number: self.ranks[number].killed_by for number in killed}
            return [
                self._death(rank, f"was killed by {signals.name_of(number)}", number)
                for rank, number in numbers.items()
                if number is not None
            ]
        return [self._death(row.hung - 1, "hangs") for row in self.rows if row.hung][:1]

    def _death(self, rank: int, how: str, number: int | None = None) -> _Death:
        row, pid = self.rows[rank], self.ranks[rank].process.pid
        return _Death(rank, pid, f"{how} {row.where}", row.begun, number)


class Supervisor:
    """Forks the ranks, waits, and forks them again.

    Args:
        backend, params, timeout: as :class:`~ignite_engine.ranks.launch.Ranks` takes them.
        restarts: at most so many in an hour.
    """

    def __init__(
        self, backend: str | None, params: Mapping[str, Any], timeout: timedelta | None, restarts: int
    ) -> None:
        self._backend, self._params, self._timeout, self._allowed = backend, params, timeout, restarts
        self._rows = shared_rows(params.get("nproc_per_node") or 1)
        self._restarted_at: deque[float] = deque(maxlen=restarts)
        self._restarts = 0
        self._died_at: dict[int, int] = {}
        """By rank the iteration at which it died last, while it has not gone beyond."""

    def run(self, work: Work) -> None:
        """Call ``work(local_rank)`` on every rank until it has ended there.

        Raises:
            LaunchError: this process cannot fork ranks.
            ProcessExitedException: (of torch) a rank died, and is not started again; the message says why.
        """
        attempt = Attempt()
        with ready_to_fork(), receiving_signals() as received:
            while True:
                with contextlib.closing(self._ranks()) as ranks:
                    ranks.attempt(partial(_in_rank, ranks.rows, attempt, work), received)
                    deaths = [] if ranks.stopped else ranks.deaths()
                    if not deaths or (ranks.stop is not None and not ranks.ended):
                        ranks.finish()
                        return
                    self._count(deaths)
                    is_known = attempt.is_known or any(row.updates for row in ranks.rows)
                    attempt = Attempt(self._announced(deaths), is_known)
                    stop = ranks.stop or _first_stop(received)
                if stop is not None:
                    sys.exit(128 + signals.treated_as(stop))

    def _ranks(self) -> _ForkedRanks:
        """The next attempt."""
        environment = {"TORCHELASTIC_RESTART_COUNT": self._restarts}
        ranks = _ForkedRanks(self._backend, {**self._params, "start_method": "fork"}, self._timeout, environment)
        ranks.rows = self._rows
        for row in ranks.rows:
            row.clear()
        return ranks

    def _count(self, deaths: Sequence[_Death]) -> None:
        """Take down what an attempt has come to.

        Raises:
            ProcessExitedException: another one would come to no more.
        """
        died = {death.rank: death.begun for death in deaths}
        for death in deaths:
            if death.begun and death.begun == self._died_at.get(death.rank):
                _give_up(death, ", where it died before. The run ends, as it would end there again.")
        now = time.monotonic()
        if len(self._restarted_at) == self._allowed and now - self._restarted_at[0] < _HOUR_S:
            times = "once" if self._allowed == 1 else f"{self._allowed} times"
            _give_up(deaths[0], f". The run ends: it was started again {times} within an hour.")
        self._restarted_at.append(now)
        self._restarts += 1
        for rank, row in enumerate(self._rows):
            if died.get(rank):
                self._died_at[rank] = died[rank]
            elif row.begun > self._died_at.get(rank, 0):
                self._died_at.pop(rank, None)

    def _announced(self, deaths: Sequence[_Death]) -> str:
        line = "; ".join(death.line for death in deaths)
        why = f"{line}. Restart {self._restarts}, of at most {self._allowed} in an hour."
        logger.warning("%s", why)
        return why


def _in_rank(rows: Sequence[RankStatus], attempt: Attempt, work: Work, local_rank: int) -> None:
    supervised(rows[agreement.rank()], attempt)
    work(local_rank)


def _give_up(death: _Death, reason: str) -> NoReturn:
    name = None if death.number is None else signals.name_of(death.number)
    code = 1 if death.number is None else -death.number
    text = death.line + reason
    raise ProcessExitedException(text, death.rank, death.pid, exit_code=code, signal_name=name)


def _first_stop(received: socket.socket | None) -> int | None:
    """The first signal that has come and asks for a stop."""
    while received is not None and wait([received], 0.0):
        for number in received.recv(64):
            if number in signals.STOPS:
                return number
    return None
