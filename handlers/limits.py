"""Stop before a time limit, or when a file appears."""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.events import Phase
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 1.0
_MARGIN_SHARE, _LARGEST_MARGIN_S = 0.05, 30.0


class _StopCheck:
    """Checked after iterations and batches of evaluations, and in waits for windows, whether to ask for a stop."""

    def attach(self, engine: Engine, event: Any = Events.ITERATION_COMPLETED) -> None:
        """Check at ``event``, during evaluations, and while the run waits for a window."""
        trainer = Trainer.of(engine)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, self._start_evaluation)
        trainer.check_while_waiting(lambda: self._check(trainer))

    def __call__(self, trainer: Trainer) -> None:
        self._check(trainer)

    def _begin(self) -> None:
        """A run starts."""
        raise NotImplementedError

    def _check(self, trainer: Trainer) -> None:
        raise NotImplementedError

    def _start(self) -> None:
        self._begin()

    _start.phase = Phase.PREPARE  # type: ignore[attr-defined]  # an evaluation at STARTED can be stopped too

    def _start_evaluation(self, trainer: Trainer) -> None:
        ongoing = trainer.state.evaluating
        assert ongoing is not None
        after_each = ongoing.evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: self._check(trainer))
        ongoing.undo.callback(after_each.remove)


class WallClockLimit(_StopCheck):
    """Stop early enough that the last checkpoint is on disk before the limit; the run returns as ``interrupted``.

    Args:
        hours, minutes, seconds: they add up to the limit.
        margin_s: reserved in addition to twice the duration of the last save (``state.save_seconds``) and the duration
            of an iteration. Until a process has saved once, only the margin is reserved for the save. None: 5 % of
            the limit, at most 30 s.
        since: reading of ``time.monotonic()`` from which the limit counts; None: the start of each ``run()``.

    ``state.reason`` is ``time limit of 3600 s``. The clock is read after each iteration and after each batch of an
    evaluation, which is then interrupted, and while the run waits for a window. A wait for a batch is not interrupted.

    Raises:
        ValueError: the limit is not above 0, or the margin is not below it.
    """

    def __init__(
        self,
        *,
        hours: float = 0.0,
        minutes: float = 0.0,
        seconds: float = 0.0,
        margin_s: float | None = None,
        since: float | None = None,
    ) -> None:
        self.limit_s = 3600.0 * hours + 60.0 * minutes + seconds
        if not 0 < self.limit_s < math.inf:
            raise ValueError(f"The limit must be above 0 s, got {self.limit_s:g} s.")
        self.margin_s = min(_MARGIN_SHARE * self.limit_s, _LARGEST_MARGIN_S) if margin_s is None else margin_s
        if not 0 <= self.margin_s < self.limit_s:
            raise ValueError(
                f"margin_s must be at least 0 and below the limit of {self.limit_s:g} s, got {self.margin_s:g}."
            )
        self.since = since
        self._deadline = math.inf
        self._checked_at = self._gap = 0.0

    def __call__(self, trainer: Trainer) -> None:
        now = time.monotonic()
        gap, before = now - self._checked_at, self._gap
        self._checked_at, self._gap = now, gap
        # the next check is an iteration later; the shorter of two gaps, as one of them may include an evaluation
        if now + min(gap, before) + _saving_s(trainer) >= self._deadline:
            trainer.request_stop(self.reason)

    @property
    def reason(self) -> str:
        return f"time limit of {round(self.limit_s, 3):.16g} s"

    def _begin(self) -> None:
        self._checked_at, self._gap = time.monotonic(), 0.0
        began = self._checked_at if self.since is None else self.since
        self._deadline = began + self.limit_s - self.margin_s

    def _check(self, trainer: Trainer) -> None:
        if time.monotonic() + _saving_s(trainer) >= self._deadline:
            trainer.request_stop(self.reason)


class StopFile(_StopCheck):
    """Stop when a file appears: ``touch PATH`` saves and ends the run as ``interrupted``, by ``stop file PATH``.

    Args:
        path: checked at most once a second, on every rank; one rank that sees it is enough.

    The file is never removed, so it can stop several runs. A file that exists before a run starts does not stop that
    run, which logs one line; touch the file again to stop it. A wait for a window is interrupted, one for a batch is
    not.
    """

    def __init__(self, path: str | Path = "stop", *, directory: str | Path = ".") -> None:
        self.path = (Path(directory) / path).absolute()  # wherever the run goes
        self._next_check = 0.0
        self._old: tuple[int, int] | None = None

    def _check(self, trainer: Trainer) -> None:
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _CHECK_EVERY_S
            if (found := _identity(self.path)) is not None and found != self._old:
                trainer.request_stop(f"stop file {self.path}")

    def _begin(self) -> None:
        self._next_check, self._old = 0.0, _identity(self.path)
        if self._old is not None and agreement.rank() == 0:
            logger.warning(
                "The stop file %s existed before this run and does not stop it: touch it again to stop, or remove it.",
                self.path,
            )


def _identity(path: Path) -> tuple[int, int] | None:
    """Inode and modification time, which change when the file is created or touched; None without a file."""
    try:
        status = os.stat(path)
    except OSError:  # missing, or the file system failed: that is not a request
        return None
    return status.st_ino, status.st_mtime_ns


def _saving_s(trainer: Trainer) -> float:
    """Time for two saves: one may be due or in flight in the background when the last one follows."""
    return 2 * trainer.state.save_seconds
