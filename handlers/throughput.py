"""Training speed, and how the time of an iteration is spent, by the host's clock."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ignite_engine import devices
from ignite_engine.errors import is_number
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.ranks import agreement
from ignite_engine.ranks.agreement import gather_floats
from ignite_engine.ranks.mesh import by_data_rank
from ignite_engine.step.device_peaks import peak_flops as peak_of
from ignite_engine.step.flops import CompiledCalls, FlopCount, obstacle
from ignite_engine.step.micro_batches import first_dimension, micro_batches_of
from ignite_engine.step.precision import DTYPES

logger = logging.getLogger(__name__)


class Throughput:
    """Rates and mean times since it last wrote; a few clock reads per iteration, no host sync.

    Args:
        tokens_fn: ``tokens_fn(batch) -> int`` counts the tokens of a micro-batch (on the host, as loaded).
        samples_fn: the same for samples; without it, the first dimension of the first tensor or array in the
            micro-batch. If there is none, ``samples_per_s`` is not written.
        flops: True counts the FLOPs of forward and backward in the second iteration, by torch's counter, and takes them
            for each token (without ``tokens_fn`` for each sample) of the others. Where it cannot count, as with
            torch.compile, a warning says so: give ``flops(batch) -> float`` of a micro-batch's forward and backward.
        peak_flops: FLOP/s of one device at most, for the MFU; None: by a table of data sheets, for the device and the
            precision of an Update.

    An iteration is timed from GET_BATCH_STARTED to ITERATION_COMPLETED (or to an evaluation that starts there), so
    evaluations, checkpoints and other handlers between iterations are not included. Written at the event:

    - ``throughput/steps_per_s`` (iterations), ``throughput/samples_per_s``, ``throughput/tokens_per_s`` (with
      ``tokens_fn``): summed over the ranks, divided by the time of the slowest;
    - ``throughput/tflops_per_s`` (with ``flops``), summed likewise; ``throughput/mfu``, its share of the peak of all
      devices; with counted FLOPs ``throughput/hfu``, the same of all that is executed, with what backward recomputes;
    - ``throughput/data_wait_share``: the share of the time spent waiting for the loader, 0 to 1;
    - ``time/step_ms``, ``time/data_wait_ms``, and if the update fires the optimizer's events
      ``time/forward_backward_ms`` (to OPTIMIZER_STEP_STARTED) and ``time/optimizer_ms`` (clip and step): means per
      iteration and over ranks. On an accelerator these are the times to queue the work, not to execute it;
    - ``time/handlers_ms``: between iterations, without evaluations: handlers, saves and sinks; and of it
      ``time/sink/<name>_ms``, what each sink of this rank took to write. Means per iteration, too.

    Beside a :class:`~ignite_engine.handlers.StepTimes` on a CPU it reads that one's clock and leaves the times of
    ``time/`` that both have to it; an iteration is then without the handlers that run within it.

    One collective at the event, none between. No state is saved.
    """

    phase = Phase.MEASURE
    replayed = False

    def __init__(
        self,
        tokens_fn: Callable[[Any], int] | None = None,
        *,
        samples_fn: Callable[[Any], int] | None = None,
        flops: bool | Callable[[Any], float] = False,
        peak_flops: float | None = None,
    ) -> None:
        self.tokens_fn = tokens_fn
        self.samples_fn = samples_fn if samples_fn is not None else _samples
        if peak_flops is not None and not (is_number(peak_flops) and peak_flops > 0):
            raise ValueError(f"peak_flops must be the FLOP/s of one device, above 0, or None, got {peak_flops!r}.")
        self.flops_fn = flops if callable(flops) else None
        self.peak_flops = peak_flops
        self._counted = _CountedIteration(self) if flops is True else None
        self._own_clock = _IterationClock()
        self._clock: _IterationClock | _StepTimesClock = self._own_clock
        self._since = 0.0
        self._sinks_before: dict[str, float] = {}
        self._forget_counts()

    def attach(self, trainer: Engine, event: Any = Events.ITERATION_COMPLETED(every=50)) -> None:  # noqa: B008  # immutable
        trainer.add_event_handler(Events.STARTED, self._start)
        self._own_clock.attach(trainer)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._end_iteration)
        if self._counted is not None:
            self._counted.attach(trainer)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Engine) -> None:
        now, of_sinks = perf_counter(), getattr(trainer.state, "sink_seconds", {})
        times = self._clock.take()
        outside_s = now - self._since - times.total_s - times.evaluation_s
        flops = self._flops_and_peak(trainer) if self._counts_flops else ()
        sums = (*times[:5], self._samples, self._tokens, outside_s, *flops)
        everyone = gather_floats([float(value) for value in sums])
        rows = by_data_rank(everyone)
        self._forget_counts()
        self._since = now
        steps, total, wait, compute, step, samples, tokens, outside, *of_flops = (sum(column) for column in zip(*rows))
        slowest = max(row[1] for row in rows)
        if not steps or not slowest:
            return
        metrics = trainer.state.metrics
        metrics["throughput/steps_per_s"] = steps / len(rows) / slowest
        if samples:
            metrics["throughput/samples_per_s"] = samples / slowest
        if tokens:
            metrics["throughput/tokens_per_s"] = tokens / slowest
        if of_flops:
            useful, executed, _ = of_flops
            peak = sum(row[-1] for row in everyone)  # of all devices, also of those that share a model
            rates = {"tflops_per_s": useful / 1e12, "mfu": useful / peak, "hfu": executed / peak}
            metrics.update({f"throughput/{name}": rate / slowest for name, rate in rates.items() if rate == rate})
        metrics["throughput/data_wait_share"] = wait / total
        if compute:
            metrics["time/forward_backward_ms"] = 1e3 * compute / steps
        if self._clock is self._own_clock:
            metrics["time/step_ms"] = 1e3 * total / steps
            metrics["time/data_wait_ms"] = 1e3 * wait / steps
            if compute:
                metrics["time/optimizer_ms"] = 1e3 * step / steps
            metrics["time/handlers_ms"] = 1e3 * outside / steps
        for name, seconds in of_sinks.items():
            metrics[f"time/sink/{name}_ms"] = 1e3 * (seconds - self._sinks_before.get(name, 0.0)) / (times.steps or 1)
        self._sinks_before = dict(of_sinks)

    @property
    def _counts_flops(self) -> bool:
        return self.flops_fn is not None or self._counted is not None

    def _flops_and_peak(self, trainer: Engine) -> tuple[float, float, float]:
        """FLOPs of this rank since it last wrote, FLOPs with what is recomputed, and peak FLOP/s; NaN: unknown."""
        useful, executed = self._flops, math.nan
        if self._counted is not None:
            useful, executed = self._counted.of(self._tokens, self._samples, self._micro_batches)
        return useful, executed, self.peak_flops or _peak(trainer)[0] or math.nan

    def _forget_counts(self) -> None:
        self._samples = self._tokens = self._micro_batches = 0
        self._flops = 0.0

    def _start(self, trainer: Engine) -> None:
        """Read the clock of a StepTimes if one is attached, else one of its own."""
        listeners = (handler for handler, _, _ in trainer._event_handlers[Events.STARTED])
        clocks = (getattr(getattr(handler, "__self__", None), "host_clock", None) for handler in listeners)
        clock = next((clock for clock in clocks if clock is not None), None)
        self._since = perf_counter()
        if clock is None:
            self._clock = self._own_clock
            self._own_clock.attach(trainer)
        else:
            self._own_clock.detach()
            self._clock = _StepTimesClock(clock)
            self._forget_counts()

    def _end_iteration(self, trainer: Engine) -> None:
        if self._clock is self._own_clock:
            self._own_clock.end_iteration()
        micro_batches = micro_batches_of(trainer)
        for micro_batch in micro_batches:
            self._samples += self.samples_fn(micro_batch)
            if self.tokens_fn is not None:
                self._tokens += self.tokens_fn(micro_batch)
            if self.flops_fn is not None:
                self._flops += self.flops_fn(micro_batch)
        self._micro_batches += len(micro_batches)


class _IterationTimes(NamedTuple):
    """Iterations since they were last taken, and their seconds."""

    steps: int
    total_s: float
    wait_s: float
    compute_s: float
    step_s: float
    evaluation_s: float


class _IterationClock:
    """Host times of iterations, from GET_BATCH_STARTED to ITERATION_COMPLETED or an evaluation that starts there."""

    phase = Phase.MEASURE
    replayed = False

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._started: float | None = None
        self._batch_ready = self._step_started = self._evaluation_started = 0.0
        self._reset()

    def attach(self, trainer: Engine) -> None:
        self._started = None
        if self._handles:
            return
        handlers = {
            Events.GET_BATCH_STARTED: self._start_wait,
            Events.GET_BATCH_COMPLETED: self._end_wait,
            TrainingEvents.OPTIMIZER_STEP_STARTED: self._start_step,
            TrainingEvents.OPTIMIZER_STEP_COMPLETED: self._end_step,
            TrainingEvents.OPTIMIZER_STEP_SKIPPED: self._end_step,
            # whichever is first: an evaluation runs before the other handlers of ITERATION_COMPLETED
            TrainingEvents.EVALUATION_STARTED: self._start_evaluation,
            TrainingEvents.EVALUATION_COMPLETED: self._end_evaluation,
        }
        self._handles = [trainer.add_event_handler(event, handler) for event, handler in handlers.items()]

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def take(self) -> _IterationTimes:
        """The times since the last call."""
        times = _IterationTimes(
            self._steps, self._total_s, self._wait_s, self._compute_s, self._step_s, self._evaluation_s
        )
        self._reset()
        return times

    def _reset(self) -> None:
        self._steps = 0
        self._total_s = self._wait_s = self._compute_s = self._step_s = self._evaluation_s = 0.0

    def _start_evaluation(self) -> None:
        self.end_iteration()
        self._evaluation_started = perf_counter()

    def _end_evaluation(self) -> None:
        self._evaluation_s += perf_counter() - self._evaluation_started

    def _start_wait(self) -> None:
        if self._started is None:  # fired again when an exhausted loader is restarted: still the same wait
            self._started = perf_counter()

    def _end_wait(self) -> None:
        self._batch_ready = perf_counter()
        if self._started is not None:
            self._wait_s += self._batch_ready - self._started

    def _start_step(self) -> None:
        self._step_started = perf_counter()
        self._compute_s += self._step_started - self._batch_ready

    def _end_step(self) -> None:
        if self._step_started:
            self._batch_ready = perf_counter()  # for another update in the same iteration
            self._step_s += self._batch_ready - self._step_started
            self._step_started = 0.0

    def end_iteration(self) -> None:
        if self._started is not None:
            self._total_s += perf_counter() - self._started
            self._started = None
            self._steps += 1


class _StepTimesClock:
    """The iterations as a StepTimes measures them.

    Args:
        clock: its host clock: ``steps``, and ``seconds`` by part.
    """

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._before = self._read()

    def take(self) -> _IterationTimes:
        """The times since the last call."""
        before, self._before = self._before, self._read()
        return _IterationTimes(*(now - then for now, then in zip(self._before, before)))  # type: ignore[arg-type]  # int first

    def _read(self) -> _IterationTimes:
        seconds = self._clock.seconds
        compute = seconds["copy"] + seconds["forward"] + seconds["backward"] + seconds["reduction"]
        total = seconds["data_wait"] + compute + seconds["optimizer"] + seconds["update"]
        return _IterationTimes(self._clock.steps, total, seconds["data_wait"], compute, seconds["optimizer"], 0.0)


def _samples(batch: Any) -> int:
    return first_dimension(batch) or 0


class _CountedIteration:
    """Counts the FLOPs of one iteration, without its optimizer's, and of its tokens, samples and micro-batches."""

    phase = Phase.PREPARE  # before an evaluation at the same event
    replayed = False

    def __init__(self, throughput: Throughput) -> None:
        self._throughput = throughput
        self._count: FlopCount | None = None
        self._compiled = CompiledCalls()
        self._iterations = 0
        self._flops: tuple[float, float] | None = None  # useful, executed
        self._units = (0, 0, 0)
        self._handles: list[Any] = []

    def attach(self, trainer: Any) -> None:
        resumed = (TrainingEvents.OPTIMIZER_STEP_COMPLETED, TrainingEvents.OPTIMIZER_STEP_SKIPPED)
        self._handles = [
            trainer.add_event_handler(Events.ITERATION_STARTED, self._begin),
            trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, self._pause),
            *(trainer.add_event_handler(event, self._resume) for event in resumed),  # for another update
        ]
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._end)

    def of(self, tokens: int, samples: int, micro_batches: int) -> tuple[float, float]:
        """FLOPs of so many: useful ones, and all that are executed; NaN: they are not known."""
        if self._flops is None:
            return math.nan, math.nan
        in_all, counted = next(pair for pair in zip((tokens, samples, micro_batches), self._units) if pair[1])
        return self._flops[0] * in_all / counted, self._flops[1] * in_all / counted

    def _begin(self, trainer: Any) -> None:
        self._iterations += 1
        if self._iterations == 1:  # in which torch compiles, and DDP makes its buckets
            self._compiled.start()
            trainer.call_at_end(self._break_off)
            return
        why = obstacle(trainer.update, calls_compiled=self._compiled.found)
        if why is not None:
            self._done()
            if agreement.rank() == 0:
                logger.warning(
                    "FLOPs are not counted: %s. Throughput(flops=...) takes a function that gives those of a "
                    "micro-batch's forward and backward.",
                    why,
                )
            return
        self._count = FlopCount()
        self._count.start()
        trainer.call_at_end(self._break_off)

    def _pause(self, trainer: Any) -> None:
        if self._count is not None:
            self._count.stop()

    def _resume(self, trainer: Any) -> None:
        if self._count is not None:
            self._count.start()

    def _break_off(self, trainer: Any) -> None:
        self._compiled.stop()
        self._pause(trainer)
        self._count = None

    def _end(self, trainer: Any) -> None:
        self._compiled.stop()
        if self._count is None:
            return
        count = self._count
        self._break_off(trainer)
        if self._iterations < 4 and not count.executed:
            return  # nothing had a weight
        self._done()
        if count.executed:
            self._flops = float(count.executed - count.recomputed), float(count.executed)
            groups = micro_batches_of(trainer, repeated=True)
            tokens_fn, samples_fn = self._throughput.tokens_fn, self._throughput.samples_fn
            tokens = 0 if tokens_fn is None else sum(map(tokens_fn, groups))
            self._units = tokens, sum(map(samples_fn, groups)), len(groups)
        if agreement.rank() == 0:
            self._report(trainer, count)

    def _done(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _report(self, trainer: Any, count: FlopCount) -> None:
        if self._flops is None:
            logger.warning("FLOPs are not counted: an iteration has no matrix product, convolution or attention.")
            return
        name, size = next(
            (name, number) for name, number in zip(("token", "sample", "micro-batch"), self._units) if number
        )
        peak, what = _peak(trainer)
        if self._throughput.peak_flops is not None:
            peak, what = self._throughput.peak_flops, "peak_flops"
        of_peak = (
            f"No MFU without peak_flops: {what}." if peak is None else f"MFU is of {peak / 1e12:,g} TFLOP/s ({what})."
        )
        logger.info(
            "Forward and backward compute %.4g GFLOP for a %s; %.1f %% more is computed again in backward. %s",
            self._flops[0] / size / 1e9,
            name,
            100 * (self._flops[1] / self._flops[0] - 1),
            of_peak,
        )
        if count.unknown:
            logger.warning(
                "FLOPs are counted without %s, for which torch has no formula: MFU is higher than written. "
                "torch.utils.flop_counter.register_flop_formula gives one.",
                ", ".join(sorted(count.unknown)),
            )


def _peak(trainer: Any) -> tuple[float | None, str]:
    """FLOP/s of this rank's device at most, and of what, or why it is not known."""
    update = trainer.update
    first = next(iter(getattr(update, "updates", {"": update}).values()))
    device, precision = getattr(first, "device", None), getattr(first, "precision", None)
    model = getattr(first, "model", None)
    if not isinstance(device, torch.device) or device.type == "cpu":
        return None, "the model is on the CPU"
    if not isinstance(precision, str) or not isinstance(model, nn.Module):
        return None, "the precision of the update is its own"
    dtype = DTYPES[precision] or next((parameter.dtype for parameter in model.parameters()), torch.float32)
    tf32 = devices.may_use_tf32(convolutions=any(isinstance(module, _ConvNd) for module in model.modules()))
    name = devices.name_of(device)
    what = f"{name}, {'tf32' if tf32 and dtype == torch.float32 else str(dtype).removeprefix('torch.')}"
    peak = peak_of(name, dtype, tf32=tf32)
    return (peak, f"{what}, dense") if peak is not None else (None, f"{what}, is not in the table")
