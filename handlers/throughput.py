"""Training speed, and how the time of an iteration is spent, by the host's clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine import Group
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.ranks.agreement import gather_floats
from ignite_engine.ranks.mesh import by_data_rank
from ignite_engine.step.micro_batches import first_dimension


class Throughput:
    """Rates and mean times since it last wrote; a few clock reads per iteration, no host sync.

    Args:
        tokens_fn: ``tokens_fn(batch) -> int`` counts the tokens of a micro-batch (on the host, as loaded).
        samples_fn: the same for samples; without it, the first dimension of the first tensor or array in the
            micro-batch. If there is none, ``samples_per_s`` is not written.

    An iteration is timed from GET_BATCH_STARTED to ITERATION_COMPLETED (or to an evaluation that starts there), so
    evaluations, checkpoints and other handlers between iterations are not included. Written at the event:

    - ``throughput/steps_per_s`` (iterations), ``throughput/samples_per_s``, ``throughput/tokens_per_s`` (with
      ``tokens_fn``): summed over the ranks, divided by the time of the slowest;
    - ``throughput/data_wait_share``: the share of the time spent waiting for the loader, 0 to 1;
    - ``time/step_ms``, ``time/data_wait_ms``, and if the update fires the optimizer's events
      ``time/forward_backward_ms`` (to OPTIMIZER_STEP_STARTED) and ``time/optimizer_ms`` (clip and step): means per
      iteration and over ranks. On CUDA these are the times to queue the work, not to execute it;
    - ``time/handlers_ms``: between iterations, without evaluations: handlers, saves and sinks; and of it
      ``time/sink/<name>_ms``, what each sink of this rank took to write. Means per iteration, too.

    One collective at the event, none between. No state is saved.
    """

    phase = Phase.MEASURE

    def __init__(
        self, tokens_fn: Callable[[Any], int] | None = None, *, samples_fn: Callable[[Any], int] | None = None
    ) -> None:
        self.tokens_fn = tokens_fn
        self.samples_fn = samples_fn if samples_fn is not None else _samples
        self._reset()
        self._started: float | None = None
        self._batch_ready = self._step_started = self._since = self._evaluation_started = 0.0
        self._sinks_before: dict[str, float] = {}

    def attach(self, trainer: Engine, event: Any = Events.ITERATION_COMPLETED(every=50)) -> None:  # noqa: B008  # immutable
        trainer.add_event_handler(Events.STARTED, self._forget_iteration)
        trainer.add_event_handler(Events.GET_BATCH_STARTED, self._start_wait)
        trainer.add_event_handler(Events.GET_BATCH_COMPLETED, self._end_wait)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, self._start_step)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, self._end_step)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_SKIPPED, self._end_step)
        # whichever is first: an evaluation runs before the other handlers of ITERATION_COMPLETED
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, self._start_evaluation)
        trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, self._end_evaluation)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._end_iteration)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Engine) -> None:
        now, of_sinks = perf_counter(), getattr(trainer.state, "sink_seconds", {})
        outside_s = now - self._since - self._total_s - self._evaluation_s
        sums = (self._steps, self._total_s, self._wait_s, self._compute_s, self._step_s, self._samples, self._tokens)
        rows = by_data_rank(gather_floats([float(value) for value in (*sums, outside_s)]))
        own_steps = self._steps
        self._reset()
        self._since = now
        steps, total, wait, compute, step, samples, tokens, outside = (sum(column) for column in zip(*rows))
        slowest = max(row[1] for row in rows)
        if not steps or not slowest:
            return
        metrics = trainer.state.metrics
        metrics["throughput/steps_per_s"] = steps / len(rows) / slowest
        if samples:
            metrics["throughput/samples_per_s"] = samples / slowest
        if tokens:
            metrics["throughput/tokens_per_s"] = tokens / slowest
        metrics["throughput/data_wait_share"] = wait / total
        metrics["time/step_ms"] = 1e3 * total / steps
        metrics["time/data_wait_ms"] = 1e3 * wait / steps
        if compute:
            metrics["time/forward_backward_ms"] = 1e3 * compute / steps
            metrics["time/optimizer_ms"] = 1e3 * step / steps
        metrics["time/handlers_ms"] = 1e3 * outside / steps
        for name, seconds in of_sinks.items():
            metrics[f"time/sink/{name}_ms"] = 1e3 * (seconds - self._sinks_before.get(name, 0.0)) / (own_steps or 1)
        self._sinks_before = dict(of_sinks)

    def _reset(self) -> None:
        self._steps = self._samples = self._tokens = 0
        self._total_s = self._wait_s = self._compute_s = self._step_s = self._evaluation_s = 0.0

    def _forget_iteration(self, trainer: Engine) -> None:
        self._started, self._since = None, perf_counter()

    def _start_evaluation(self, trainer: Engine) -> None:
        self._end_iteration(trainer)
        self._evaluation_started = perf_counter()

    def _end_evaluation(self, trainer: Engine) -> None:
        self._evaluation_s += perf_counter() - self._evaluation_started

    def _start_wait(self, trainer: Engine) -> None:
        if self._started is None:  # fired again when an exhausted loader is restarted: still the same wait
            self._started = perf_counter()

    def _end_wait(self, trainer: Engine) -> None:
        self._batch_ready = perf_counter()
        if self._started is not None:
            self._wait_s += self._batch_ready - self._started

    def _start_step(self, trainer: Engine) -> None:
        self._step_started = perf_counter()
        self._compute_s += self._step_started - self._batch_ready

    def _end_step(self, trainer: Engine) -> None:
        if self._step_started:
            self._batch_ready = perf_counter()  # for another update in the same iteration
            self._step_s += self._batch_ready - self._step_started
            self._step_started = 0.0

    def _end_iteration(self, trainer: Engine) -> None:
        if self._started is None:
            return
        self._total_s += perf_counter() - self._started
        self._started = None
        self._steps += 1
        state: Any = trainer.state
        micro_batches: Any = state.batch if isinstance(state.batch, Group) else (state.batch,)
        if getattr(state, "padding", 0):  # repeated batches with weight zero are not samples
            micro_batches = micro_batches[: -state.padding]
        for micro_batch in micro_batches:
            self._samples += self.samples_fn(micro_batch)
            if self.tokens_fn is not None:
                self._tokens += self.tokens_fn(micro_batch)


def _samples(batch: Any) -> int:
    return first_dimension(batch) or 0
