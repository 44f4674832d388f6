"""The loggers of a config's run for what a follower measures beside it: a task of their own, not the run's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ignite.engine import Events

from ignite_engine import handlers
from ignite_engine.config import Config
from ignite_engine.events import TrainingEvents
from ignite_engine.handlers.sinks import attach_sink
from ignite_engine.ranks import agreement
from ignite_engine.run_directory import RunDirectory
from ignite_engine.trainer import Trainer

NOT_METRICS = ("checkpoint", "iteration", "epoch")


class _Bus(Trainer):
    """Carries values to sinks without a run."""

    def __init__(self) -> None:
        super().__init__(lambda engine, batch: None)
        self._ends: list[Callable[[Trainer], None]] = []

    def call_at_end(self, callback: Callable[[Trainer], None]) -> None:
        self._ends.append(callback)

    def end(self) -> None:
        for callback in self._ends:
            callback(self)


@contextmanager
def followed_loggers(config: Config) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Within it the function that is yielded reports what was measured of a checkpoint, as a follower announces it.

    ClearML gets a task of its own, as the run's is written by the run: two processes would end each other's. Offline it
    is in ``follow/clearml`` of the run's folder.
    """
    if not config.logging.clearml or agreement.rank() != 0:
        yield lambda values: None
        return
    folder, name = RunDirectory(config.directory).followed.parent, f"{config.name}, followed"
    bus = _Bus()
    sink = handlers.ClearMLLogger(folder, project=config.logging.project, task=name)
    attach_sink(sink, bus)
    bus.fire_event(Events.STARTED)

    def report(values: Mapping[str, Any]) -> None:
        bus.state.iteration, bus.state.epoch = values["iteration"], values["epoch"]
        # an older checkpoint may come after a newer one
        sink.load_state_dict({"task_id": sink.task_id, "written": {}})
        bus.state.metrics.update({name: value for name, value in values.items() if name not in NOT_METRICS})
        bus.fire_event(TrainingEvents.METRICS_READY)
        bus.state.metrics.fresh.clear()

    bus.state.status = "interrupted"  # by whatever is raised: the session is not waited for then
    try:
        yield report
        bus.state.status = "completed"
    finally:
        bus.end()
