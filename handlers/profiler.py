"""Traces of a few iterations, by torch's profiler."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events

from ignite_engine import Trainer
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)

OPERATORS = 15


class Profiler:
    """Records iterations of each run with ``torch.profiler``, and writes their trace and their longest operators.

    Args:
        directory: of the run. A window gives ``profiles/rank_0_to_iteration_15.json.gz``, a trace for
            https://ui.perfetto.dev or ``chrome://tracing``, and beside it ``.txt``, the operators by their own time.
        wait, warmup, active, repeat: as of ``torch.profiler.schedule``, in iterations of a run.
        ranks: that are profiled.
        options: of ``torch.profiler.profile``, such as ``record_shapes``, ``profile_memory`` and ``with_stack``.

    The operators are also logged. A window begins and ends behind the handlers of ITERATION_COMPLETED, so evaluations
    and saves between its iterations are in the trace. Where the run ends within a window, what was recorded is written.
    torch has one profiler for a process. No state is saved: a resumed run waits again.

    Raises:
        ValueError: a number is out of range.
    """

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
        if min(wait, warmup) < 0 or min(active, repeat) < 1:
            raise ValueError(
                "Profiler needs wait and warmup of at least 0, active and repeat of at least 1, got "
                f"{wait=}, {warmup=}, {active=}, {repeat=}."
            )
        self.directory = Path(directory).absolute() / "profiles"
        self.wait, self.warmup, self.active, self.repeat, self.ranks = wait, warmup, active, repeat, tuple(ranks)
        self.options = options
        self._profile: torch.profiler.profile | None = None
        self._windows = self._last = 0

    def attach(self, engine: Engine, event: Any = Events.ITERATION_COMPLETED) -> None:
        trainer = Trainer.of(engine)
        if agreement.rank() in self.ranks:
            trainer.add_event_handler(Events.STARTED, self._start)
            trainer.add_event_handler(event, self)

    def __call__(self, trainer: Engine) -> None:
        if self._profile is not None:
            self._last = trainer.state.iteration
            self._profile.step()
            if self._windows == self.repeat:
                self._end()

    def _start(self, trainer: Trainer) -> None:
        schedule = torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat)
        # without activities: all that torch can record here
        self._profile = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write, **self.options)
        self._windows = 0
        self._profile.start()
        trainer.call_at_end(lambda trainer: self._end())

    def _end(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def _write(self, profile: torch.profiler.profile) -> None:
        self._windows += 1
        path = self.directory / f"rank_{agreement.rank()}_to_iteration_{self._last}"
        averages: Any = profile.key_averages()
        kind = "device" if any(operator.self_device_time_total for operator in averages) else "cpu"
        table = averages.table(sort_by=f"self_{kind}_time_total", row_limit=OPERATORS)
        logger.info("Profile to iteration %d on rank %d (%s):\n%s", self._last, agreement.rank(), path, table)
        self.directory.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".txt").write_text(f"{table}\n", encoding="utf-8")
        profile.export_chrome_trace(f"{path}.json.gz")
