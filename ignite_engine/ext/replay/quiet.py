"""A built run, changed from outside so that nothing in its folder is written.

Only the list of handlers and the registry are touched: a handler whose ``replayed`` is False, as it writes, measures
time or watches for requests, is taken off; the states of sinks stay in the registry under their names, and a checkpoint
handler counts its saves instead of making them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.checkpointing.layout import checkpoint_name
from ignite_engine.checkpointing.store import Newest
from ignite_engine.engine.bus import Filtered, events_with_handlers, handlers_of
from ignite_engine.engine.intervals import Clock
from ignite_engine.errors import ReplayError
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.ext.replay.iteration import scalars_of
from ignite_engine.ext.replay.logged import Difference, Kept, Lines, LoggedMetrics, LoggedTrail
from ignite_engine.handlers import Checkpoint, DigestTrail, Evaluation, MetricLogger, ModelBank, Stopwatch
from ignite_engine.handlers.checkpoint.saver import Saver, boundary_of, tell
from ignite_engine.handlers.sinks import GuardedSink, JSONLSink
from ignite_engine.ranks import agreement
from ignite_engine.state import Start
from ignite_engine.trainer import Trainer

OnSave = Callable[[Trainer, Mapping[str, Any], Mapping[str, Any]], None]


class Quieted:
    """What a run that was made quiet says of itself.

    Attributes:
        metrics: the lines of each file of metrics; on rank 0.
        compared: those, and those of the trail.
        difference: the first one from what the run has logged; None: there is none so far.
    """

    def __init__(self, trainer: Trainer, before: int, config: Mapping[str, Any] | None) -> None:
        self.compared: list[LoggedMetrics | LoggedTrail] = []
        self.metrics: list[LoggedMetrics] = []
        self.on_save: OnSave | None = None
        self.difference: Difference | None = None
        self.checkpoints = [obj for obj in trainer.registry.objects.values() if isinstance(obj, Checkpoint)]
        _refuse_what_reads_others(trainer)
        for checkpoint in self.checkpoints:
            checkpoint.announces_best = False
            checkpoint.tiers.clear()  # what they hold belongs to the run, which may be running
            checkpoint._saver = CountingSaver(checkpoint._saver, before, config, self._saved)
        self._take_sinks(trainer)
        self.compared += self.metrics
        for trail in _owners(trainer):
            if isinstance(trail, DigestTrail):
                logged = LoggedTrail(Lines(trail.path), self.note)
                trail.write = logged.write
                self.compared.append(logged)
        _take_off(trainer)
        trainer.requests.checks.clear()
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._compare)

    def save_into(self, directory: str | Path, trainer: Trainer) -> None:
        """Make a checkpoint in a folder that is not the run's, in which nothing is pruned."""
        counting = self.checkpoints[0]._saver
        saver = Saver(directory, replace(counting.options, keep_last=sys.maxsize))
        saver.run_id, saver.parent = counting.run_id, counting.parent
        with saver.taken(trainer):
            saver.save(trainer, metrics=self.checkpoints[0]._metrics_of(trainer))

    def _saved(self, trainer: Trainer, shared: Mapping[str, Any], local: Mapping[str, Any]) -> None:
        if self.on_save is not None:
            self.on_save(trainer, shared, local)

    def note(self, difference: Difference) -> None:
        """Keep the first difference."""
        self.difference = self.difference or difference

    def keep_states(self, trainer: Trainer, names: Iterable[str]) -> None:
        """Give a place to the states of sinks that were not built."""
        for name in names:
            if name not in trainer.registry.objects:
                trainer.register(name, Kept(None))

    def _compare(self, trainer: Trainer) -> None:
        state = trainer.state
        at_end = state.status == "completed"
        clocks = {name for name, meter in state.meters.items() if isinstance(meter, Stopwatch)}
        for metrics in self.metrics:
            metrics.clocks |= clocks
            metrics.means |= scalars_of(state.output).keys()
            metrics.write(state.iteration, {"epoch": state.epoch, **state.metrics.fresh}, at_end=at_end)

    _compare.phase = Phase.LOG  # type: ignore[attr-defined]

    def _take_sinks(self, trainer: Trainer) -> None:
        """Put into the registry, in the place of each sink, what has its state."""
        sinks = [owner.sink for owner in _owners(trainer) if isinstance(owner, GuardedSink)]
        # a sink with an attach of its own is known by its logger alone
        sinks += [sink for owner in _owners(trainer) if isinstance(owner, MetricLogger) for sink in owner.sinks]
        for sink in {id(sink): sink for sink in sinks}.values():
            stand_in: Any = None
            if isinstance(sink, JSONLSink) and agreement.rank() == 0:
                stand_in = LoggedMetrics(Lines(sink.path), self.note)
                self.metrics.append(stand_in)
            elif hasattr(sink, "state_dict"):
                stand_in = Kept(sink.state_dict() if isinstance(sink, JSONLSink) else None)
            name = getattr(sink, "name", None)
            if stand_in is not None and name in trainer.registry.objects:
                trainer.registry.objects[name] = stand_in
        _remove(trainer, lambda owner: any(owner is sink for sink in sinks))


class CountingSaver(Saver):
    """Counts saves as if they were made; of the folder it sees the checkpoints before an iteration.

    Args:
        saver: in whose place it is.
        before: that iteration.
        config: of the run as it was, for a checkpoint that is saved elsewhere; None: as it was built.
        saved: called at each save with what it would hold.
    """

    def __init__(self, saver: Saver, before: int, config: Mapping[str, Any] | None, saved: OnSave) -> None:
        options = saver.options if config is None else replace(saver.options, config=config)
        super().__init__(saver.store.directory, options)
        self.store = StoreBefore(saver.store.directory, before)
        self._saved = saved

    def start(self, trainer: Trainer) -> None:
        if trainer.state.start is Start.FRESH:
            self._saved_at = None
        self.run_id, self.has_run = self.run_id or "replay", True

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Nothing: they are in the manifest."""

    def save(self, trainer: Trainer, **options: Any) -> None:
        state = trainer.state
        state.checkpoints += 1
        self._saved_at, self._saving_at = boundary_of(trainer), state.iteration
        name = checkpoint_name(state.iteration)
        self.parent, state.checkpoint_path = name, self.store.directory / name
        state.saved_iteration, state.save_seconds = state.iteration, 0.0
        shared, local = (self.filter(parts, trainer.registry.kinds)[0] for parts in trainer.registry.capture())
        self._saved(trainer, shared, local)
        tell(trainer, TrainingEvents.CHECKPOINT_SAVED)


class StoreBefore(CheckpointStore):
    """The checkpoints of a folder that were saved before an iteration."""

    def __init__(self, directory: Path, before: int) -> None:
        super().__init__(directory)
        self.before = before

    def latest(self, *, healthy_only: bool = False, keep: bool = False) -> Newest:
        for checkpoint in reversed(self.checkpoints()):
            wanted = checkpoint.iteration < self.before and (checkpoint.manifest.healthy or not healthy_only)
            if wanted and not self.verify(checkpoint.path):
                return Newest(checkpoint, [])
        return Newest(None, [])


def _refuse_what_reads_others(trainer: Trainer) -> None:
    if any(isinstance(owner, ModelBank) for owner in _owners(trainer)):
        raise ReplayError(
            "The run loads other checkpoints while it trains (checkpoint.load with dynamic), and which they were is "
            "not kept: it cannot be replayed."
        )


def _take_off(trainer: Trainer) -> None:
    _remove(trainer, lambda owner: getattr(owner, "replayed", True) is False)
    for owner in _owners(trainer):
        if isinstance(owner, Evaluation):
            owner._progress = None
    logged = [owner.directory for owner in _owners(trainer) if isinstance(owner, MetricLogger)]
    lines = next((Lines(path / "metrics.jsonl") for path in logged if path is not None), None)
    if lines is None:
        return
    for event in events_with_handlers(trainer):  # where a clock has decided, the run's own lines say it
        for entry, (handler, arguments, options) in enumerate(entries := handlers_of(trainer, event)):
            if type(handler) is Filtered and isinstance(handler.filter, Clock):
                known = Filtered(trainer, event, lambda engine, count: count in lines.by_iteration, handler.handler)
                entries[entry] = known, arguments, options


def _owners(trainer: Trainer) -> list[Any]:
    """The objects that have a handler, without repetition."""
    owners = [
        _owner(function) for event in events_with_handlers(trainer) for function, _, _ in handlers_of(trainer, event)
    ]
    return list({id(owner): owner for owner in owners}.values())


def _owner(function: Any) -> Any:
    handler = function.handler if type(function) is Filtered else function
    return getattr(handler, "__self__", handler)


def _remove(trainer: Trainer, is_unwanted: Callable[[Any], bool]) -> None:
    for event in events_with_handlers(trainer):
        entries = handlers_of(trainer, event)
        entries[:] = [entry for entry in entries if not is_unwanted(_owner(entry[0]))]
