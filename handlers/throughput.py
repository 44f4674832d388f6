"""Training speed: samples, tokens and FLOPs per second."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from ignite.engine import Engine, Events
from torch.utils.flop_counter import FlopCounterMode

from ignite_engine import Trainer
from ignite_engine.errors import is_number
from ignite_engine.events import Phase
from ignite_engine.ranks import agreement, mesh
from ignite_engine.update.micro_batches import first_dimension, group_of

logger = logging.getLogger(__name__)


class Throughput:
    """Rates since it last wrote; two clock reads per iteration, no host sync.

    Args:
        tokens_fn: ``tokens_fn(batch) -> int`` counts the tokens of a micro-batch (on the host, as loaded).
        samples_fn: the same for samples; without it, the first dimension of the first tensor or array in the
            micro-batch.
        flops: True counts the FLOPs of the second iteration, by torch's ``FlopCounterMode``, and takes them for each
            token (without ``tokens_fn`` for each sample) of the others. Where it cannot count, as with torch.compile, a
            warning says so: give ``flops(batch) -> float`` of a micro-batch's forward and backward.
        peak_flops: FLOP/s of one device at most, for the MFU.

    An iteration is timed from GET_BATCH_STARTED to ITERATION_COMPLETED, so evaluations, saves and other handlers
    between iterations are not included. Written at the event, summed over the ranks, divided by the time of the
    slowest: ``throughput/samples_per_s``, or where no samples can be counted ``throughput/steps_per_s`` (iterations);
    with ``tokens_fn`` ``throughput/tokens_per_s``; with ``flops`` ``throughput/tflops_per_s`` and, if ``peak_flops`` is
    given, ``throughput/mfu``.

    One collective at the event, none between. No state is saved.
    """

    phase = Phase.MEASURE

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
        self._began: float | None = None
        self._reset()

    def attach(self, engine: Engine, event: Any = Events.ITERATION_COMPLETED(every=50)) -> None:  # noqa: B008  # immutable
        trainer = Trainer.of(engine)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.GET_BATCH_STARTED, self._begin_iteration)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._end_iteration)
        if self._counted is not None:
            self._counted.attach(trainer)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Engine) -> None:
        """Write the interval's rates into ``state.metrics``; a collective."""
        flops = self._flops
        if self._counted is not None:
            flops = self._counted.per_unit * (self._samples if self.tokens_fn is None else self._tokens)
        everyone = agreement.gather_floats([float(self._steps), self._seconds, self._samples, self._tokens, flops])
        rows = mesh.by_data_rank(everyone)
        self._reset()
        steps, _, samples, tokens, flops = (sum(column) for column in zip(*rows, strict=True))
        slowest = max(row[1] for row in rows)
        if not steps or not slowest:
            return
        metrics = trainer.state.metrics
        if samples:
            metrics["throughput/samples_per_s"] = samples / slowest
        else:
            metrics["throughput/steps_per_s"] = steps / len(rows) / slowest
        if tokens:
            metrics["throughput/tokens_per_s"] = tokens / slowest
        if flops > 0:  # else they are not known
            metrics["throughput/tflops_per_s"] = flops / slowest / 1e12
            if self.peak_flops is not None:  # of all devices, also of those that share a model
                metrics["throughput/mfu"] = flops / slowest / (self.peak_flops * len(everyone))

    def _reset(self) -> None:
        self._steps = 0
        self._seconds = self._samples = self._tokens = self._flops = 0.0

    def _start(self) -> None:
        self._began = None

    def _begin_iteration(self) -> None:
        if self._began is None:  # fired again when an exhausted loader is restarted: still the same wait
            self._began = perf_counter()

    def _end_iteration(self, trainer: Engine) -> None:
        if self._began is not None:
            self._seconds += perf_counter() - self._began
            self._began = None
        self._steps += 1
        for micro_batch in group_of(trainer, trainer.state.batch).real:
            self._samples += float(self.samples_fn(micro_batch))
            if self.tokens_fn is not None:
                self._tokens += float(self.tokens_fn(micro_batch))
            if self.flops_fn is not None:
                self._flops += float(self.flops_fn(micro_batch))

    _end_iteration.phase = Phase.FIRST  # type: ignore[attr-defined]  # before an evaluation at the same event


def _samples(batch: Any) -> int:
    return first_dimension(batch) or 0


class _CountedIteration:
    """Counts the FLOPs of one iteration for each of its tokens, or samples."""

    phase = Phase.FIRST  # before an evaluation at the same event

    def __init__(self, throughput: Throughput) -> None:
        self.per_unit = math.nan
        self._throughput = throughput
        self._counter: FlopCounterMode | None = None
        self._iterations = 0
        self._handles: list[Any] = []

    def attach(self, trainer: Any) -> None:
        self._handles = [
            trainer.add_event_handler(Events.ITERATION_STARTED, self._begin),
            trainer.add_event_handler(Events.ITERATION_COMPLETED, self._end),
        ]

    def _begin(self, trainer: Any) -> None:
        self._iterations += 1
        if self._iterations == 1:  # in which torch compiles, and DDP makes its buckets
            return
        if why := _obstacle():
            self._give_up(why)
            return
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        trainer.call_at_end(self._stop)

    def _stop(self, trainer: Any) -> None:
        """The iteration has ended, or the run within it."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)

    def _end(self, trainer: Any) -> None:
        if (counter := self._counter) is None:
            return
        self._stop(trainer)
        flops, count = counter.get_total_flops(), self._throughput.tokens_fn or self._throughput.samples_fn
        units = sum(float(count(batch)) for batch in group_of(trainer, trainer.state.batch))
        if flops and units:
            self._done()
            self.per_unit = flops / units
            unit = "sample" if self._throughput.tokens_fn is None else "token"
            if agreement.rank() == 0:
                logger.info("Forward and backward compute %.4g GFLOP for a %s.", self.per_unit / 1e9, unit)
        elif self._iterations == 4:  # others may have been skipped
            self._give_up("an iteration has no samples, or no matrix product, convolution or attention")

    def _give_up(self, why: str) -> None:
        self._done()
        if agreement.rank() == 0:
            logger.warning(
                "FLOPs are not counted: %s. Throughput(flops=...) takes a function that gives those of a micro-batch's "
                "forward and backward.",
                why,
            )

    def _done(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _obstacle() -> str | None:
    """Why FLOPs cannot be counted, or not without changing what is computed; None: they can."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    if counters.get("stats", {}).get("unique_graphs", 0):
        # under the counter torch falls back to the eager code, to other bits
        return "torch.compile is in use, whose code the counter does not see"
    if mesh.data_size() < agreement.world_size():
        return "ranks share a model (tensor parallel), and the counter does not see which part is whose"
    return None
