"""An engine that evaluates without side effects on modes, weights and random numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.metrics import Metric
from torch import nn

from ignite_engine.checkpoint.states.model_and_optimizer import reshard, unwrap
from ignite_engine.data.readers import generators_of
from ignite_engine.data.sampler import Dealing, ResumableSampler
from ignite_engine.errors import check_type, shapes_of
from ignite_engine.loop import bus
from ignite_engine.ranks import agreement
from ignite_engine.ranks.ddp import data_parallel, own_buffers
from ignite_engine.ranks.mesh import metrics_reduce
from ignite_engine.update.device import device_of, one_ahead
from ignite_engine.update.precision import Precision, autocast, check_precision

logger = logging.getLogger(__name__)

PredictFn = Callable[[Any, Any], Any]


class _Evaluator(Engine):
    """An engine that can run again after a run that raised; Ignite's would return None without running."""

    model: nn.Module
    predict: PredictFn
    step: Callable[[Engine, Any], Any]

    def __init__(self, step: Callable[[Engine, Any], Any]) -> None:
        super().__init__(step)
        self.step, self.metrics_reduce = step, ExitStack()
        self.device: torch.device | None = None
        """The model's device during a run; finding it at each batch would cost more than a small metric."""
        self.no_grad = torch.no_grad()  # making the context costs as much as entering it

    def run(self, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.device = device_of(self.model)
        try:
            return super().run(data, *args, **kwargs)
        except BaseException:
            self._internal_run_generator = None
            raise
        finally:
            self.device = None
            self.metrics_reduce.close()

    def _fire_event(self, event_name: Any, *event_args: Any, **event_kwargs: Any) -> None:
        """As Ignite's, without the debug line that Ignite formats for each event."""
        bus.fire(self, event_name, *event_args, **event_kwargs)


def create_evaluator(
    model: nn.Module,
    predict: PredictFn,
    metrics: Mapping[str, Metric] | None = None,
    *,
    precision: Precision = "fp32",
) -> Engine:
    """An Ignite engine whose ``state.output`` is ``predict(model, batch)``, in eval mode and without gradients.

    Args:
        model: plain or wrapped; a DDP model runs the module inside, and one made of several shares no buffers, so ranks
            may have different numbers of batches (and with FSDP2 in :class:`~ignite_engine.handlers.Evaluation`).
        predict: gets the batch on the model's device; returns what the metrics take, usually ``(y_pred, y)``.
        metrics: attached under their names; they reduce over the data-parallel ranks themselves.
        precision: of the forward pass, ``fp32``, ``bf16`` or ``fp16``, or a function that returns its context.
    """
    check_type("model", model, isinstance(model, nn.Module), "a module")
    check_type("predict", predict, callable(predict), "a function predict(model, batch)")
    is_named = metrics is None or isinstance(metrics, Mapping)
    check_type("metrics", metrics, is_named, "a mapping of names to metrics, or None")
    for name, metric in (metrics or {}).items():
        check_type(f"metrics[{name!r}]", metric, isinstance(metric, Metric), "a metric of Ignite's")
    if not callable(precision):
        check_precision(precision)
    bare = unwrap(model)
    inner = data_parallel(bare)

    def step(engine: Engine, batch: Any) -> Any:
        device = evaluator.device or device_of(bare)
        try:
            with evaluator.no_grad:
                if device.type == "cpu" and precision == "fp32" and not inner:
                    return predict(bare, batch)
                if device.type != "cpu":
                    (batch,) = one_ahead([batch], device)
                with autocast(precision, device.type), own_buffers(inner) if inner else nullcontext():
                    return predict(bare, batch)
        except Exception as error:
            error.add_note(f"The batch: {shapes_of(batch)}.")
            raise

    evaluator = _Evaluator(step)
    evaluator.model, evaluator.predict = bare, predict
    several = agreement.world_size() > 1
    if several:
        reduce = evaluator.metrics_reduce
        evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: reduce.enter_context(metrics_reduce()))
    for name, metric in (metrics or {}).items():
        metric.attach(evaluator, name)
    if several:
        evaluator.add_event_handler(Events.EPOCH_COMPLETED, evaluator.metrics_reduce.close)
    return evaluator


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into eval mode, and each of its modules back into the mode it had, on an error too.

    Buffers that a forward in eval mode writes, as the observers of quantization do, are put back.
    The parameters are sharded again: handlers that keep those of FSDP2's forward would keep memory that is freed.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with buffers_kept(model):
            yield
    finally:
        for module, training in modes:
            module.training = training
        reshard(model)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put back the buffers of ``model``, whose forward may change or replace some."""
    held = [(module, *named) for module in model.modules() for named in module.named_buffers(recurse=False)]
    before = [buffer.detach().clone() for _, _, buffer in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for (module, name, buffer), value in zip(held, before, strict=True):
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                if not torch.equal(buffer, value):
                    buffer.resize_(value.shape).copy_(value)


@contextmanager
def whole_pass(data: Any, dealing: Dealing | None = None) -> Iterator[None]:
    """Iterate over a loader that training may be in the middle of: from its first batch, and restore its position.

    ``dealing`` says which batches of a ``loader()`` are this rank's; None: single samples are dealt out.
    The generators of the loader and its samplers are restored, too: the order of the next pass is as without this one.
    """
    sampler, generators = getattr(data, "sampler", None), generators_of(data)
    states = [generator.get_state() for generator in generators]
    with sampler.by_hand(dealing) if isinstance(sampler, ResumableSampler) else nullcontext():
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
