"""Traces of a few iterations, by torch's profiler."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from ignite.engine import Engine, Events

from ignite_engine.errors import Interrupted, is_whole
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)

OPERATORS = 15


class Profiler:
    """Records ``active`` iterations with ``torch.profiler``, and writes their trace and their longest operators.

    Args:
        directory: of the run. A window gives ``profiles/rank_0_iterations_13_to_15.json.gz``, a trace for
            https://ui.perfetto.dev or ``chrome://tracing``, and beside it ``.txt``, the operators by their own time.
        wait: iterations of this process before a window.
        warmup: iterations after them in which the profiler runs and its first costs pass; they are not recorded.
        active: iterations that are recorded.
        repeat: windows, each after ``wait`` and ``warmup`` of its own.
        ranks: that are profiled.
        options: of ``torch.profiler.profile``, such as ``record_shapes``, ``profile_memory`` and ``with_stack``.

    The operators are also logged. A window begins and ends
    behind the handlers of ITERATION_COMPLETED, so evaluations and saves between its iterations are in the trace. Where
    the run ends within a window, what was recorded is written; a file that cannot be written is a warning. While
    another profiler runs in this process, a window waits. No state is saved: a resumed run waits again.

    Raises:
        ValueError: a number is out of range.
    """

    _at_work: ClassVar[Profiler | None] = None  # torch has one profiler for the whole process

    def __init__(
        self,
        directory: str | Path,
        *,
        wait: int = 10,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        ranks: Sequence[int] = (0,),
        **options: Any,
    ) -> None:
        for name, number, least in (
            ("wait", wait, 0),
            ("warmup", warmup, 0),
            ("active", active, 1),
            ("repeat", repeat, 1),
        ):
            if not is_whole(number) or number < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {number!r}.")
        if not ranks or not all(is_whole(rank) and rank >= 0 for rank in ranks):
            raise ValueError(f"ranks must be numbers of ranks, such as (0,), got {ranks!r}.")
        self.directory = Path(directory).absolute() / "profiles"
        self.wait, self.warmup, self.active, self.repeat, self.ranks = wait, warmup, active, repeat, tuple(ranks)
        self.options = options
        self._profile: torch.profiler.profile | None = None
        self._passed = self._windows = self._last = 0
        self._handle: Any = None

    def attach(self, trainer: Engine, event: Any = Events.ITERATION_COMPLETED) -> None:
        if agreement.rank() not in self.ranks:
            if agreement.rank() == 0 and min(self.ranks) >= agreement.world_size():
                logger.warning(
                    "Profiler(ranks=%r) profiles nothing: this run has %d ranks, counted from 0.",
                    self.ranks,
                    agreement.world_size(),
                )
            return
        if not self.wait:
            trainer.add_event_handler(Events.STARTED, self._start)
        self._handle = trainer.add_event_handler(event, self)

    def __call__(self, trainer: Engine) -> None:
        self._passed += 1
        if self._profile is None:
            if self._passed >= self.wait:
                self._begin(trainer)
            return
        self._last = trainer.state.iteration
        self._profile.step()
        if self._passed == self.warmup + self.active:
            self._end(trainer)

    def _start(self, trainer: Any) -> None:
        if self._profile is None and self._windows < self.repeat:
            self._begin(trainer)

    def _begin(self, trainer: Any) -> None:
        if Profiler._at_work is not None or getattr(torch.autograd, "_profiler_enabled", bool)():
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # it was asked for
            schedule = torch.profiler.schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1)
        # without activities: all that torch can record here
        self._profile = torch.profiler.profile(schedule=schedule, **self.options)
        Profiler._at_work, self._passed = self, 0
        self._profile.start()
        trainer.call_at_end(self._end)

    def _end(self, trainer: Any) -> None:
        """The window ends, when it is full or with the run."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        recorded, self._passed = self._passed - self.warmup, 0
        Profiler._at_work = None
        self._windows += 1
        if self._windows == self.repeat:
            self._handle.remove()
        profile.stop()
        if recorded > 0 and not isinstance(sys.exception(), Interrupted | KeyboardInterrupt):  # those are in a hurry
            self._write(trainer, profile, recorded)

    def _write(self, trainer: Any, profile: torch.profiler.profile, recorded: int) -> None:
        first, rank = self._last - recorded + 1, agreement.rank()
        path = self.directory / f"rank_{rank}_iterations_{first}_to_{self._last}.json.gz"
        averages: Any = profile.key_averages()
        kind = "device" if any(operator.self_device_time_total for operator in averages) else "cpu"
        table = averages.table(sort_by=f"self_{kind}_time_total", row_limit=OPERATORS)
        logger.info("Profile of iterations %d to %d on rank %d (%s):\n%s", first, self._last, rank, path, table)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path.with_name(path.name.replace(".json.gz", ".txt")).write_text(table + "\n", encoding="utf-8")
            profile.export_chrome_trace(str(path))
        except OSError as error:
            logger.warning("The profile %s could not be written: %s.", path, error)
