"""Training speed: samples, tokens and FLOPs per second."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine import Trainer
from ignite_engine.events import Phase
from ignite_engine.ranks import agreement, mesh
from ignite_engine.update.micro_batches import first_dimension, group_of


class Throughput:
    """Rates since it last wrote; two clock reads per iteration, no host sync.

    Args:
        tokens_fn: ``tokens_fn(batch) -> int`` counts the tokens of a micro-batch (on the host, as loaded).
        samples_fn: the same for samples; without it, the first dimension of the first tensor or array in the
            micro-batch.
        flops: of forward and backward for each token, without ``tokens_fn`` for each sample; of a transformer about
            six times the parameters. ``torch.utils.flop_counter.FlopCounterMode`` counts those of a batch.
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
        flops: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.tokens_fn, self.samples_fn = tokens_fn, samples_fn or _samples
        self.flops, self.peak_flops = flops, peak_flops
        self._began: float | None = None
        self._reset()

    def attach(self, engine: Engine, event: Any = Events.ITERATION_COMPLETED(every=50)) -> None:  # noqa: B008  # immutable
        trainer = Trainer.of(engine)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.GET_BATCH_STARTED, self._begin_iteration)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._end_iteration)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Engine) -> None:
        """Write the interval's rates into ``state.metrics``; a collective."""
        everyone = agreement.gather_floats([float(self._steps), self._seconds, self._samples, self._tokens])
        rows = mesh.by_data_rank(everyone)
        self._reset()
        steps, _, samples, tokens = (sum(column) for column in zip(*rows, strict=True))
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
        if self.flops is not None:
            flops_per_s = self.flops * (samples if self.tokens_fn is None else tokens) / slowest
            metrics["throughput/tflops_per_s"] = flops_per_s / 1e12
            if self.peak_flops is not None:  # of all devices, also of those that share a model
                metrics["throughput/mfu"] = flops_per_s / (self.peak_flops * len(everyone))

    def _reset(self) -> None:
        self._steps = 0
        self._seconds = self._samples = self._tokens = 0.0

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

    _end_iteration.phase = Phase.FIRST  # type: ignore[attr-defined]  # before an evaluation at the same event


def _samples(batch: Any) -> int:
    return first_dimension(batch) or 0
