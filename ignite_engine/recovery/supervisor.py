"""A parent that forks its ranks, and forks them again when one has died: the run takes back a step, not its start."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, NoReturn

from torch.multiprocessing.spawn import ProcessExitedException

from ignite_engine.ranks import agreement, signals
from ignite_engine.ranks.launch import Ranks, receiving_signals
from ignite_engine.recovery.forking import ready_to_fork
from ignite_engine.recovery.status import Attempt, RankStatus, shared_rows, supervised

logger = logging.getLogger(__name__)

_HOUR_S = 3600.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 60.0
_DIED, _KILLED_FROM_OUTSIDE = 2, 3  # in a row at one iteration: it would end there again, or may
_CANNOT_COME_BACK = 2  # attempts in a row in which a rank dies before its first update
_KERNEL_COUNTS = Path("/proc/vmstat")
_STOPPED = frozenset(128 + signals.treated_as(stop) for stop in signals.STOPS)


@dataclass(frozen=True)
class Policy:
    """When ranks are started again.

    Attributes:
        restarts: at most so many in an hour.
        restart_on: ``signal``: a rank was killed or hangs; ``any``: also after an exception.
        min_ranks: a rank that cannot come back is left out while so many are left; None: never.
    """

    restarts: int
    restart_on: Literal["signal", "any"] = "signal"
    min_ranks: int | None = None


@dataclass(frozen=True)
class _Death:
    """A rank that has died, hangs or has failed.

    Attributes:
        local_rank: on this machine, whose number stays where a rank is left out.
        how: as the end of a sentence about it, with the iteration.
        begun: that iteration; 0: none had begun.
        phase: of the iteration.
        samples: of its batch, where it had died at the same iteration before.
        number: of the signal that killed it; None: none has.
        traceback: of what it raised.
        from_outside: somebody has killed it, nothing that it did: not the kernel, for its memory.
    """

    rank: int
    local_rank: int
    pid: int
    how: str
    begun: int
    phase: int
    samples: str
    number: int | None = None
    traceback: str = ""
    from_outside: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return self.begun, self.phase

    @property
    def line(self) -> str:
        return f"Rank {self.rank} (process {self.pid}) {self.how}"


class _ForkedRanks(Ranks):
    """Ranks of which all are killed when one has died, as they go on from what is saved."""

    rows: Sequence[RankStatus] = ()
    local_ranks: Sequence[int] = ()
    ended = False
    """They were killed here because one of them had died."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._out_of_memory_before = _killed_for_memory()

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

    def deaths(self, *, of_exceptions: bool) -> list[_Death]:
        """Of ranks that were killed, or else the one that hangs, or else the first that raised."""
        if killed := self.killed:
            numbers = {number: self.ranks[number].killed_by for number in killed}
            return [self._killed(rank, number) for rank, number in numbers.items() if number is not None]
        for row in self.rows:
            if row.hung:
                return [self._death(row.hung - 1, "hangs")]
        raised = [rank for rank in self.ranks if rank.end and rank.end.code in (None, 1) and not rank.ended_here]
        if not of_exceptions or not raised:
            return []
        first = min(raised, key=lambda rank: (rank.end.code == 1, rank.end.at) if rank.end else (True, 0.0))
        return [self._death(first.number, "failed", traceback=first.end.traceback if first.end else "")]

    def _killed(self, rank: int, number: int) -> _Death:
        death = self._death(rank, f"was killed by {signals.name_of(number)}", number)
        if number != signal.SIGKILL or (now := _killed_for_memory()) is None:
            return death
        if now != self._out_of_memory_before:
            return replace(death, how=f"{death.how}, out of memory")
        return replace(death, from_outside=True)

    def _death(self, rank: int, how: str, number: int | None = None, traceback: str = "") -> _Death:
        row, pid = self.rows[rank], self.ranks[rank].process.pid
        samples = row.samples if row.suspect == row.begun else ""
        return _Death(
            rank, self.local_ranks[rank], pid, f"{how} {row.where}", row.begun, row.phase, samples, number, traceback
        )


class Supervisor:
    """Forks the ranks, waits, and forks them again.

    Args:
        backend, params, timeout: as :class:`~ignite_engine.ranks.launch.Ranks` takes them.
    """

    def __init__(
        self, backend: str | None, params: Mapping[str, Any], timeout: timedelta | None, policy: Policy
    ) -> None:
        self._backend, self._params, self._timeout, self._policy = backend, params, timeout, policy
        self._all = list(range(params.get("nproc_per_node") or 1))
        self._rows = shared_rows(len(self._all))
        self._restarted_at: deque[float] = deque(maxlen=policy.restarts)
        self._restarts = 0
        self._suspects: dict[int, tuple[tuple[int, int], int]] = {}
        """By local rank the iteration at which it died last, with its phase, and how often in a row it died there."""
        self._early: Counter[int] = Counter()
        """By local rank in how many attempts in a row it died before an update."""
        self._in_vain = 0
        """Attempts in a row in which no rank has done an update."""

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call ``func(local_rank, *args, **kwargs)`` on every rank until it has ended there.

        Raises:
            LaunchError: this process cannot fork ranks.
            ProcessExitedException: (of torch) a rank died, and is not started again; the message says why.
        """
        attempt = Attempt(needs_invariance=self._policy.min_ranks is not None)
        with ready_to_fork(), receiving_signals() as received:
            while True:
                with contextlib.closing(self._ranks()) as ranks:
                    ranks.attempt(_in_rank, (ranks.rows, attempt, func, args, kwargs), {}, received)
                    deaths = [] if ranks.stopped else ranks.deaths(of_exceptions=self._policy.restart_on == "any")
                    if not deaths or (ranks.stop is not None and not ranks.ended):
                        ranks.finish()
                        return
                    self._count(deaths, ranks)
                    has_trained = attempt.is_known or any(row.updates for row in ranks.rows)
                    is_known = has_trained and not attempt.needs_invariance
                    attempt = replace(attempt, reason=self._announced(deaths), is_known=is_known)
                    stop = ranks.stop or _first_stop(received, self._wait_s())
                if stop is not None:
                    sys.exit(128 + signals.treated_as(stop))

    def _ranks(self) -> _ForkedRanks:
        """The next attempt: all ranks, or those without one that cannot come back."""
        lost = {local_rank for local_rank, attempts in self._early.items() if attempts >= _CANNOT_COME_BACK}
        chosen = [local_rank for local_rank in self._all if local_rank not in lost]
        if self._policy.min_ranks is None or len(chosen) < self._policy.min_ranks:
            chosen = self._all
        elif lost:
            logger.warning(
                "Local rank %s died before its first update twice: the run continues on %d of %d ranks.",
                *(", ".join(map(str, sorted(lost))), len(chosen), len(self._all)),
            )
            for local_rank in lost:
                self._early[local_rank] = _CANNOT_COME_BACK - 1  # the next restart tries all of them again
        params = {**self._params, "start_method": "fork", "local_ranks": chosen}
        environment = {"TORCHELASTIC_RESTART_COUNT": self._restarts}
        ranks = _ForkedRanks(self._backend, params, self._timeout, environment)
        ranks.local_ranks, ranks.rows = chosen, self._rows[: len(chosen)]
        for local_rank, row in zip(chosen, ranks.rows, strict=True):
            row.clear()
            row.suspect = self._suspect_of(local_rank)[0]
        return ranks

    def _count(self, deaths: Sequence[_Death], ranks: _ForkedRanks) -> None:
        """Take down what an attempt has come to.

        Raises:
            ProcessExitedException: another one would come to no more.
        """
        died = {death.local_rank: death for death in deaths}
        times: dict[int, int] = {}
        for local_rank, death in died.items():
            place, before = self._suspects.get(local_rank, (None, 0))
            times[local_rank] = before + 1 if place == death.place else 1
            if death.begun and times[local_rank] >= (_KILLED_FROM_OUTSIDE if death.from_outside else _DIED):
                again = "before" if times[local_rank] == _DIED else "twice before"
                samples = f" Its batch holds the samples {death.samples}." if death.samples else ""
                _give_up(death, f", where it died {again}. The run ends, as it would end there again.{samples}")
        now, restarts = time.monotonic(), self._policy.restarts
        if len(self._restarted_at) == restarts and now - self._restarted_at[0] < _HOUR_S:
            _give_up(deaths[0], f". The run ends: it was started again {_times(restarts)} within an hour.")
        self._restarted_at.append(now)
        self._restarts += 1
        for local_rank, row in zip(ranks.local_ranks, ranks.rows, strict=True):
            dead = died.get(local_rank)
            self._early[local_rank] = self._early[local_rank] + 1 if dead and not row.updates else 0
            if dead and dead.begun:
                self._suspects[local_rank] = dead.place, times[local_rank]
            elif row.begun > self._suspect_of(local_rank)[0]:
                self._suspects.pop(local_rank, None)
        self._in_vain = 0 if any(row.updates for row in ranks.rows) else self._in_vain + 1

    def _suspect_of(self, local_rank: int) -> tuple[int, int]:
        """Iteration and phase at which it died last; zeros: nowhere."""
        return self._suspects[local_rank][0] if local_rank in self._suspects else (0, 0)

    def _wait_s(self) -> float:
        """Before the next attempt: nothing, unless the last ones have not come to an update."""
        return min(_FIRST_WAIT_S * 2 ** (self._in_vain - 2), _LONGEST_WAIT_S) if self._in_vain > 1 else 0.0

    def _announced(self, deaths: Sequence[_Death]) -> str:
        line = "; ".join(death.line for death in deaths)
        for death in deaths:
            if death.traceback:
                logger.error("%s", death.traceback.rstrip())
        why = f"{line}. Restart {self._restarts}, of at most {self._policy.restarts} in an hour."
        logger.warning("%s", why)
        return why


def _in_rank(local_rank: int, rows: Sequence[RankStatus], attempt: Attempt, func: Any, args: Any, kwargs: Any) -> None:
    supervised(local_rank, rows[agreement.rank()], attempt, func, args, kwargs)


def _killed_for_memory() -> int | None:
    """How many processes the kernel has killed since it was started, as memory, a container's too, was full.

    None: it does not say.
    """
    try:
        counts = dict(line.split() for line in _KERNEL_COUNTS.read_text().splitlines())
        return int(counts["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


def _give_up(death: _Death, reason: str) -> NoReturn:
    name = None if death.number is None else signals.name_of(death.number)
    code = 1 if death.number is None else -death.number
    text = death.line + reason
    raise ProcessExitedException(text, death.rank, death.pid, exit_code=code, signal_name=name)


def _first_stop(received: socket.socket | None, seconds: float) -> int | None:
    """Wait; the first signal that came and asks for a stop."""
    until = time.monotonic() + seconds
    while True:
        left = max(until - time.monotonic(), 0.0)
        if received is None:
            time.sleep(left)
        elif wait([received], left):
            stops = [number for number in received.recv(64) if number in signals.STOPS]
            if stops:
                return stops[0]
            continue
        return None


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
