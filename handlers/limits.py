"""Save at an interval of time, stop before a time limit, do what a file asks for."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ignite.engine import Events

from ignite_engine import Phase, Trainer, TrainingEvents
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 1.0
_REQUESTS = ("stop.request", "save.request", "evaluate.request")
_MARGIN_SHARE, _LARGEST_MARGIN_S = 0.05, 30.0


class SaveEvery:
    """Request a checkpoint when this time has passed since the last one, for any reason.

    Rank 0's clock decides. The iterations of the checkpoints differ between runs; the training does not.

    Args:
        minutes, seconds: they add up.

    Raises:
        ValueError: the time is not above 0.
    """

    replayed = False

    def __init__(self, *, minutes: float = 0.0, seconds: float = 0.0) -> None:
        self.interval_s = 60.0 * minutes + seconds
        if not 0 < self.interval_s < math.inf:
            name, number = ("seconds", seconds) if seconds else ("minutes", minutes)
            raise ValueError(f"{name} must be a number above 0, got {number}.")
        self._due = math.inf

    def attach(self, trainer: Trainer, event: Any = Events.ITERATION_COMPLETED) -> None:
        """Read the clock at ``event``; the save is at the next step boundary on which all ranks agree."""
        trainer.add_event_handler(Events.STARTED, self._restart)
        trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, self._restart)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        if time.monotonic() >= self._due:
            self._restart()
            trainer.request_save()

    def _restart(self) -> None:
        self._due = time.monotonic() + self.interval_s if agreement.rank() == 0 else math.inf


class WallClockLimit:
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

    replayed = False

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

    def attach(self, trainer: Trainer, event: Any = Events.ITERATION_COMPLETED) -> None:
        """Read the clock at ``event``, during evaluations, and while the run waits for a window."""
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, self._start_evaluation)
        trainer.check_while_waiting(lambda: self._check(trainer))

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

    def _start(self) -> None:
        self._checked_at, self._gap = time.monotonic(), 0.0
        began = self._checked_at if self.since is None else self.since
        self._deadline = began + self.limit_s - self.margin_s

    _start.phase = Phase.PREPARE  # type: ignore[attr-defined]  # an evaluation at STARTED is limited too

    def _start_evaluation(self, trainer: Trainer) -> None:
        _while_evaluating(trainer, lambda: self._check(trainer))

    def _check(self, trainer: Trainer) -> None:
        if time.monotonic() + _saving_s(trainer) >= self._deadline:
            trainer.request_stop(self.reason)


class StopFile:
    """Stop when a file appears: ``touch PATH`` saves and ends the run as ``interrupted``, by ``stop file PATH``.

    Args:
        path: checked at most once a second, on every rank; one rank that sees it is enough.

    The file is never removed, so it can stop several runs. A file that exists before a run starts does not stop that
    run, which logs one line; touch the file again to stop it. A wait for a window is interrupted, one for a batch is
    not.
    """

    replayed = False

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._next_check = 0.0
        self._old: tuple[int, int] | None = None

    def attach(self, trainer: Trainer, event: Any = Events.ITERATION_COMPLETED) -> None:
        """Check at ``event``, during evaluations, and while the run waits for a window."""
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, self._start_evaluation)
        trainer.check_while_waiting(lambda: self(trainer))

    def __call__(self, trainer: Trainer) -> None:
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _CHECK_EVERY_S
            if (found := _identity(self.path)) is not None and found != self._old:
                trainer.request_stop(f"stop file {self.path}")

    def _start(self) -> None:
        self._next_check, self._old = 0.0, _identity(self.path)
        if self._old is not None and agreement.rank() == 0:
            logger.warning(
                "The stop file %s existed before this run and does not stop it: touch it again to stop, or remove it.",
                self.path,
            )

    _start.phase = Phase.PREPARE  # type: ignore[attr-defined]  # an evaluation at STARTED can be stopped too

    def _start_evaluation(self, trainer: Trainer) -> None:
        _while_evaluating(trainer, lambda: self(trainer))


class RequestFiles:
    """Do what files in the run's folder ask for: ``touch RUN/stop.request``, ``save.request``, ``evaluate.request``.

    Args:
        directory: the run's folder; rank 0 looks into it once a second, and all ranks act at the same iteration.
        evaluations: what ``evaluate.request`` calls with the trainer, such as each ``Evaluation`` of the run.

    A file is removed when its request is taken, so it can be made again. A stop is that of ``trainer.request_stop``:
    the run is saved, and ends as ``interrupted``. The evaluation comes two iterations later, on several ranks up to
    about 0.25 s more, and at the end of the run where that is before. The last iteration of a run whose length is known
    has a look, too. A file that is there before a run starts is removed without effect, in one warning.
    """

    replayed = False

    def __init__(self, directory: str | Path, evaluations: Sequence[Callable[[Trainer], object]] = ()) -> None:
        self.directory, self.evaluations = Path(directory), evaluations
        absolute = self.directory.absolute()  # the run may change its working directory
        self._paths = [absolute / name for name in _REQUESTS]
        self._next_look = math.inf
        self._evaluates = False
        self._end: int | None = None
        """The run's last iteration, on the rank that looks; None: it is not known."""
        self._evaluation: Any = None
        """The handler of the next iteration, while an evaluation is due."""
        self._taken: dict[Path, tuple[int, int]] = {}
        """Inode and modification time of files that could not be removed."""

    def attach(self, trainer: Trainer, event: Any = TrainingEvents.RESUME_POINT) -> None:
        """Look at ``event``, during evaluations, and while the run waits for a window."""
        trainer.add_event_handler(Events.STARTED, self._start)
        # at each boundary, whichever the event: what was agreed on is known there alone
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self._agree_to_evaluate)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(Events.EPOCH_STARTED, self._find_the_end)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._look_at_the_last)
        trainer.add_event_handler(Events.COMPLETED, self._evaluate_at_the_end)
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, self._start_evaluation)
        trainer.check_while_waiting(lambda: self._look(trainer))

    def __call__(self, trainer: Trainer) -> None:
        if time.monotonic() >= self._next_look:
            self._look(trainer)

    def _find_the_end(self, trainer: Trainer) -> None:
        self._end = trainer.last_iteration if agreement.rank() == 0 else None

    def _look_at_the_last(self, trainer: Trainer) -> None:
        if trainer.state.iteration == self._end:  # before the last vote
            self._next_look = 0.0
            self._look(trainer)

    def _evaluate_at_the_end(self, trainer: Trainer) -> None:
        """A collective: what was asked for and has not come yet, unless the run was stopped."""
        asked = agreement.rank() == 0 and (self._evaluates or self._evaluation is not None)
        self._evaluates = False
        if agreement.gather_objects(asked)[0] and not trainer.state.stopping:
            self._evaluate(trainer)

    _evaluate_at_the_end.phase = Phase.EVALUATE  # type: ignore[attr-defined]  # before what logs its metrics

    def _start(self, trainer: Trainer) -> None:
        self._next_look, self._evaluates = math.inf, False
        self._forget_evaluation()
        if agreement.rank() == 0:
            self._next_look = 0.0
            for path in self._paths:
                if self._take(path):
                    logger.warning("%s was there before this run and has no effect: make it again.", path)

    _start.phase = Phase.PREPARE  # type: ignore[attr-defined]  # an evaluation at STARTED can be stopped too

    def _start_evaluation(self, trainer: Trainer) -> None:
        _while_evaluating(trainer, lambda: self._look(trainer))

    def _look(self, trainer: Trainer) -> None:
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + _CHECK_EVERY_S
        stop, save, evaluate = map(self._take, self._paths)
        if stop:
            trainer.request_stop(f"request file {self.directory / _REQUESTS[0]}")
        if save:
            trainer.request_save()
        if evaluate and not self.evaluations:
            logger.warning("%s has no effect: this run has no evaluation.", self._paths[2])
        elif evaluate:
            self._evaluates = True
            trainer.report_background_done()  # which all ranks learn of at the same step boundary

    def _agree_to_evaluate(self, trainer: Trainer) -> None:
        """A collective, at a boundary at which some rank had something for all of them."""
        if not trainer.state.background_done:  # the same on every rank
            return
        evaluates, self._evaluates = agreement.gather_objects(self._evaluates)[0], False
        if evaluates and self._evaluation is None:
            self._evaluation = trainer.add_event_handler(Events.ITERATION_COMPLETED, self._evaluate)

    def _evaluate(self, trainer: Trainer) -> None:
        self._forget_evaluation()
        for evaluation in self.evaluations:
            evaluation(trainer)

    _evaluate.phase = Phase.EVALUATE  # type: ignore[attr-defined]  # before what logs its metrics

    def _forget_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.remove()
            self._evaluation = None

    def _take(self, path: Path) -> bool:
        """Whether the file is there; removes it."""
        if (found := _identity(path)) is None or found == self._taken.get(path):
            return False
        self._taken[path] = found
        with contextlib.suppress(OSError):
            path.unlink()
            del self._taken[path]
        return True


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


def _while_evaluating(trainer: Trainer, check: Callable[[], None]) -> None:
    """Call ``check`` after each batch of the evaluation that is starting."""
    ongoing = trainer.state.evaluating
    assert ongoing is not None
    ongoing.undo.callback(ongoing.evaluator.add_event_handler(Events.ITERATION_COMPLETED, check).remove)
