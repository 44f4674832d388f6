"""A parent that forks its ranks, and forks them again when one has died: the run takes back a step, not its start."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from torch.multiprocessing.spawn import ProcessExitedException

from ignite_engine import devices
from ignite_engine.errors import check_type, is_whole
from ignite_engine.ext.recovery.forking import ready_to_fork
from ignite_engine.ext.recovery.status import RankStatus, shared_rows, supervised
from ignite_engine.ranks import agreement, signals
from ignite_engine.ranks.attempt import Attempt
from ignite_engine.ranks.joining import Work
from ignite_engine.ranks.launch import Ranks

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

    def __init__(self, backend: str | None, params: Mapping[str, Any], timeout: timedelta | None) -> None:
        super().__init__(backend, {**params, "start_method": "fork"}, timeout)
        self.rows = shared_rows(params.get("nproc_per_node") or 1)
        self.ended = False
        """They were killed here because one of them had died."""

    def attempt(self, work: Work, **environment: object) -> None:
        self.ended = False
        for row in self.rows:
            row.clear()
        super().attempt(work, **environment)

    def _end_peers(self, failed_s: float) -> None:
        if self.stop is None and (self.killed or any(row.hung for row in self.rows)):
            self.ended = True
            self._kill()
        else:
            super()._end_peers(failed_s)

    @property
    def stopped(self) -> bool:
        """The ranks have agreed to end the run before its end."""
        return any(code in _STOPPED for code in self.codes)

    def deaths(self) -> list[_Death]:
        """Of ranks that were killed, or else the one that hangs."""
        if killed := self.killed:
            return [
                self._death(rank, f"was killed by {signals.name_of(number)}", number) for rank, number in killed.items()
            ]
        return [self._death(row.hung - 1, "hangs") for row in self.rows if row.hung][:1]

    def _death(self, rank: int, how: str, number: int | None = None) -> _Death:
        row, pid = self.rows[rank], self.processes[rank].pid
        return _Death(rank, pid, f"{how} {row.where}", row.begun, number)


class Supervisor:
    """Forks the ranks, waits, and forks them again: what ``Parallel(restarts=n)`` does.

    This process forks the ranks, also where there is one of them. It has imported what they need and must not have used
    an accelerator. When a rank is killed all others are killed at once, which what they were saving survives, and the
    ranks are forked again. An iteration at which a rank dies twice is named and ends the run. A stop that the ranks
    have agreed on ends it, too. Under a launcher such as torchrun, which has restarts of its own, it has no effect.

    Args:
        restarts: at most so many in an hour.
        options: the other ones of ``Parallel``.

    Raises:
        TypeError: an option does not go with it.
        ValueError: no restart is allowed.
    """

    def __init__(self, restarts: int, **options: Any) -> None:
        check_type("restarts", restarts, is_whole(restarts), "a whole number, of an hour")
        if restarts < 1:
            raise ValueError(f"restarts must be at least 1, got {restarts}; leave it out for none.")
        for name, value in options.items():
            if name in ("init_method", "start_method", "nnodes") and value not in (None, "env://", "fork", 1):
                raise TypeError(f"Parallel got {name}={value!r} with restarts, which forks ranks here: leave it out.")
        devices.look_without_using()
        self._allowed = restarts
        self._restarted_at: deque[float] = deque(maxlen=restarts)
        self._restarts = 0
        self._died_at: dict[int, int] = {}
        """By rank the iteration at which it died last, while it has not gone beyond."""

    def run(self, backend: str | None, params: Mapping[str, Any], timeout: timedelta | None, work: Work) -> None:
        """Call ``work(local_rank)`` on every rank until it has ended there.

        Args:
            backend, params, timeout: as :class:`~ignite_engine.ranks.launch.Ranks` takes them.

        Raises:
            LaunchError: this process cannot fork ranks.
            ProcessExitedException: (of torch) a rank died, and is not started again; the message says why.
        """
        attempt, ranks = Attempt(), _ForkedRanks(backend, params, timeout)
        with ready_to_fork(), ranks.passing_signals_on():
            while True:
                in_rank = partial(_in_rank, ranks.rows, attempt, work)
                ranks.attempt(in_rank, TORCHELASTIC_RESTART_COUNT=self._restarts)
                deaths = [] if ranks.stopped else ranks.deaths()
                if not deaths or (ranks.stop is not None and not ranks.ended):
                    ranks.finish()
                    return
                self._count(deaths, ranks.rows)
                is_known = attempt.is_known or any(row.updates for row in ranks.rows)
                attempt = Attempt(self._announced(deaths), is_known)
                if ranks.stop is not None:
                    sys.exit(128 + signals.treated_as(ranks.stop))

    def _count(self, deaths: Sequence[_Death], rows: Sequence[RankStatus]) -> None:
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
        for rank, row in enumerate(rows):
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
