"""Stop before a time limit, or when a file appears."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.events import Phase

_LOOK_EVERY_S = 1.0
_MARGIN_SHARE, _LARGEST_MARGIN_S = 0.05, 30.0


class _StopCheck:
    """Checks after iterations and batches of evaluations, and in waits for windows, whether to ask for a stop."""

    def attach(self, engine: Engine, event: Any = Events.ITERATION_COMPLETED) -> None:
        """Check at ``event``, during evaluations, and while the run waits for a window."""
        trainer = Trainer.of(engine)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, self._start_evaluation)
        trainer.check_while_waiting(lambda: self._check(trainer, time.monotonic()))

    def __call__(self, trainer: Trainer) -> None:
        self._check(trainer, time.monotonic())

    def _begin(self) -> None:
        """A run starts."""
        raise NotImplementedError

    def _check(self, trainer: Trainer, now: float) -> None:
        raise NotImplementedError

    def _start(self) -> None:
        self._begin()

    _start.phase = Phase.PREPARE  # type: ignore[attr-defined]  # an evaluation at STARTED can be stopped too

    def _start_evaluation(self, trainer: Trainer) -> None:
        ongoing = trainer.state.evaluating
        assert ongoing is not None
        after_each = ongoing.evaluator.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: self._check(trainer, time.monotonic())
        )
        ongoing.undo.callback(after_each.remove)


class WallClockLimit(_StopCheck):
    """Stop early enough that the last checkpoint is on disk before the limit; the run returns as ``interrupted``.

    Args:
        hours, minutes, seconds: they add up to the limit, which counts from the start of each ``run()``.
        margin_s: reserved in addition to twice the duration of the last save (``state.save_seconds``) and the duration
            of an iteration. Until a process has saved once, only the margin is reserved for the save. None: 5 % of
            the limit, at most 30 s.

    ``state.reason`` is ``time limit of 3600 s``. The clock is read after each iteration and after each batch of an
    evaluation, which is then interrupted, and while the run waits for a window. A wait for a batch is not interrupted.

    Raises:
        ValueError: the limit is not above 0, or the margin is not below it.
    """

    def __init__(
        self, *, hours: float = 0.0, minutes: float = 0.0, seconds: float = 0.0, margin_s: float | None = None
    ) -> None:
        self.limit_s = 3600.0 * hours + 60.0 * minutes + seconds
        self.margin_s = min(_MARGIN_SHARE * self.limit_s, _LARGEST_MARGIN_S) if margin_s is None else margin_s
        if not 0 <= self.margin_s < self.limit_s < math.inf:
            raise ValueError(
                f"WallClockLimit needs a limit above 0 s and a margin_s from 0 to below it, got {self.limit_s:g} s and "
                f"{self.margin_s:g} s."
            )
        self._deadline = math.inf
        self._checked_at = self._gap = 0.0

    def __call__(self, trainer: Trainer) -> None:
        now = time.monotonic()
        gap, before = now - self._checked_at, self._gap
        self._checked_at, self._gap = now, gap
        # the next check is an iteration later; the shorter of two gaps, as one of them may include an evaluation
        self._check(trainer, now + min(gap, before))

    @property
    def reason(self) -> str:
        return f"time limit of {round(self.limit_s, 3):.16g} s"

    def _begin(self) -> None:
        self._checked_at, self._gap = time.monotonic(), 0.0
        self._deadline = self._checked_at + self.limit_s - self.margin_s

    def _check(self, trainer: Trainer, now: float) -> None:
        # two saves: one may be due or in flight in the background when the last one follows
        if now + 2 * trainer.state.save_seconds >= self._deadline:
            trainer.request_stop(self.reason)


class StopFile(_StopCheck):
    """Stop when a file appears: ``touch PATH`` saves and ends the run as ``interrupted``, by ``stop file PATH``.

    Args:
        path: checked at most once a second, on every rank; one rank that sees it is enough.

    The file is never removed, so it can stop several runs; an old file has no effect on a run that starts until
    it is touched again. A wait for a window is interrupted, one for a batch is not.
    """

    def __init__(self, path: str | Path = "stop", *, directory: str | Path = ".") -> None:
        self.path = (Path(directory) / path).absolute()  # wherever the run goes
        self._next_look = 0.0
        self._old: int | None = None

    def _begin(self) -> None:
        self._next_look, self._old = 0.0, self._touched_at()

    def _check(self, trainer: Trainer, now: float) -> None:
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            if self._touched_at() not in (None, self._old):
                trainer.request_stop(f"stop file {self.path}")

    def _touched_at(self) -> int | None:
        try:
            return os.stat(self.path).st_mtime_ns
        except OSError:  # a failing file system is no request
            return None
