"""One iteration's work: forward and backward over the micro-batches, clip, one step of every optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine.events import EVENT_COUNTERS, TrainingEvents
from ignite_engine.states.model_and_optimizer import ModelState, OptimizerState
from ignite_engine.step.device import device_of, to_device
from ignite_engine.step.gradients import clip_gradients, gradient_norm
from ignite_engine.step.micro_batches import Group, WeightFn, check_accumulates, gradient_sync, micro_batch_scales
from ignite_engine.step.optimizer_step import step
from ignite_engine.step.precision import autocast, check_precision, loss_scaler

LossFn = Callable[[nn.Module, Any], "Tensor | tuple[Tensor, Mapping[str, Tensor]]"]


class Update:
    """The process function of a :class:`~ignite_engine.Trainer`; works in any Ignite engine.

    Args:
        model: plain, DDP or FSDP2.
        optimizer: one, or a mapping of names to several: all of them step or none does.
        loss_fn: ``loss_fn(model, batch)`` with the batch on the model's device; returns the mean over the
            micro-batch, shape ``()``, or ``(mean, {name: detached scalar})``, the same names each time. It must not
            write to a weight.
        precision: ``fp32``, ``bf16`` or ``fp16`` (autocast; fp16 with a loss scaler).
        clip_norm: largest joint L2 norm of all gradients, in the units of the loss; None does not clip.
        weight_fn: weight of a micro-batch, e.g. its number of tokens, called on the host batch; None weighs each 1.
            Under DDP and FSDP2 gradients must be finite for one that weighs 0, too: the peers wait for them.
        grad_scaler: torch's GradScaler arguments, for fp16 only.
        log_grad_norm: report ``grad_norm`` also where nothing is clipped.

    ``state.output`` becomes a dict of detached device scalars: ``loss``, this rank's weighted sum, scaled so that
    its mean over ranks is the weighted mean of the whole group (on one process it is that mean); ``grad_norm``,
    before clipping; and the extra names, averaged likewise.

    Raises:
        ValueError: an argument is out of range, or DDP with ``static_graph`` is asked to accumulate.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        loss_fn: LossFn,
        *,
        precision: str = "fp32",
        clip_norm: float | None = None,
        weight_fn: WeightFn | None = None,
        grad_scaler: Mapping[str, Any] | None = None,
        log_grad_norm: bool = False,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, or None for no clipping, got {clip_norm}.")
        self.model = model
        self.optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}
        if not self.optimizers:
            raise ValueError("optimizer must hold at least one optimizer, got an empty mapping.")
        self.loss_fn, self.weight_fn = loss_fn, weight_fn
        self.precision, self.clip_norm, self.log_grad_norm = check_precision(precision), clip_norm, log_grad_norm
        self.device = device_of(model)
        self.scaler = loss_scaler(precision, self.device.type, grad_scaler)
        self.stepping = False
        """An optimizer's step has begun and not all have ended: the weights are of no iteration."""
        self._engine: Callable[[], Engine | None] = lambda: None
        self._wrapped = hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")
        # under FSDP2 one context over several micro-batches gives gradients off by 16-29 %
        self._shares_cast = precision != "fp32" and not any(hasattr(p, "full_tensor") for p in model.parameters())
        # one context for good: making one costs more than entering it
        self._autocast = autocast(precision, self.device.type)
        self._casts, self._on_host = precision != "fp32", self.device.type == "cpu"
        self._factors: dict[float, Tensor] = {}
        self._scales: dict[tuple[int, int, int], list[float]] = {}
        self._group_count = -1
        self._parameters: list[Tensor] = []

    def __call__(self, engine: Engine, batch: Any) -> dict[str, Tensor]:
        """Do one update with ``batch``: a list of micro-batches where the engine groups them, else the loader's."""
        if engine is not self._engine():
            self._bind(engine)
        state = engine.state
        micro_batches = batch if self._grouped or isinstance(batch, Group) else (batch,)
        scales = self._scales_of(micro_batches, state)
        parameters = self._clear_gradients()
        if scales is None:
            return self._skip(state, {"loss": torch.zeros((), device=self.device)})
        if not self._wrapped and 0.0 in scales and any(scales):
            # the mean over nothing may be NaN, and stays NaN times zero; in a wrapped model the peers wait for it
            micro_batches = [each for each, scale in zip(micro_batches, scales, strict=True) if scale]
            scales = [scale for scale in scales if scale]
        if len(scales) == 1:
            output = self._forward_backward(state, micro_batches, scales, self._casts)
        else:
            output = self._accumulate(state, micro_batches, scales, parameters)
        return self._step(state, parameters, output)

    def stateful(self) -> Iterator[tuple[str, Any, bool]]:
        """What a checkpoint holds of this: name, object with a state, and whether every rank has the same."""
        yield "model", ModelState(self.model), True
        for name, optimizer in self.optimizers.items():
            label = name if name == "optimizer" else f"optimizer/{name}"
            yield label, OptimizerState(optimizer, self.model), True
        if self.scaler is not None:
            yield "scaler", self.scaler, True

    def run_starts(self) -> None:
        """A run begins: what follows from the number of ranks is asked anew."""
        self._scales.clear()
        self.stepping = False

    def _scales_of(self, micro_batches: Any, state: Any) -> list[float] | None:
        key = len(micro_batches), state.padding, state.group_total
        scales = self._scales.get(key)
        if scales is None:
            scales = micro_batch_scales(
                micro_batches, padding=state.padding, group_total=state.group_total, weight_fn=self.weight_fn
            )
            if self.weight_fn is None and scales is not None:
                self._scales[key] = scales
        return scales

    def _accumulate(
        self, state: Any, micro_batches: Any, scales: list[float], parameters: list[Tensor]
    ) -> dict[str, Tensor]:
        if self._wrapped:
            check_accumulates(self.model)
        if not self._shares_cast or "BACKWARD_COMPLETED" in self._heard:
            return self._forward_backward(state, micro_batches, scales, self._casts)
        versions = [parameter._version for parameter in parameters]
        with self._autocast:  # each weight is cast once a group, bit-equal
            output = self._forward_backward(state, micro_batches, scales, False)
        if versions != [parameter._version for parameter in parameters]:
            raise ValueError(
                "loss_fn changed a weight in place, which the other micro-batches of the group may not have seen: "
                "change weights in a handler of ITERATION_COMPLETED, or use accumulation_steps=None."
            )
        return output

    def _forward_backward(self, state: Any, micro_batches: Any, scales: list[float], cast: bool) -> dict[str, Tensor]:
        wrapped, hears = self._wrapped, "BACKWARD_COMPLETED" in self._heard
        losses: list[Tensor] = []
        extras: list[Mapping[str, Tensor]] = []
        for batch in micro_batches if self._on_host else to_device(micro_batches, self.device):
            scale = scales[len(losses)]
            if wrapped:
                with gradient_sync(self.model, last=len(losses) == len(scales) - 1):
                    losses.append(self._backward(batch, scale, extras, cast))
            else:
                losses.append(self._backward(batch, scale, extras, cast))
            if hears:
                state.micro_batches += 1
                self._fire(TrainingEvents.BACKWARD_COMPLETED)
        if not hears:
            state.micro_batches += len(losses)
        output = {"loss": _weighted(losses, scales)}
        return output if not extras else output | _weighted_by_name(extras, scales)

    def _backward(self, batch: Any, scale: float, extras: list[Mapping[str, Tensor]], cast: bool) -> Tensor:
        """Forward and backward of one micro-batch on the device; its mean loss, detached."""
        if cast:
            with self._autocast:
                result = self.loss_fn(self.model, batch)
        else:
            result = self.loss_fn(self.model, batch)
        if isinstance(result, tuple):
            result, named = result
            extras.append(named)
        result.backward(self._incoming(scale, result))
        return result.detach()

    def _step(self, state: Any, parameters: list[Tensor], output: dict[str, Tensor]) -> dict[str, Tensor]:
        finite = self.scaler is None or self.scaler.unscale_all(self.optimizers.values())
        if "OPTIMIZER_STEP_STARTED" in self._heard:
            self._fire(TrainingEvents.OPTIMIZER_STEP_STARTED)
        if self.clip_norm is not None:
            output["grad_norm"] = clip_gradients(parameters, self.clip_norm)
        elif self.log_grad_norm:
            output["grad_norm"] = gradient_norm([p.grad for p in parameters if p.grad is not None])
        if finite:
            self.stepping = True
            for optimizer in self.optimizers.values():
                step(optimizer)
            self.stepping = False
        if self.scaler is not None:
            self.scaler.adjust()
        if not finite:
            return self._skip(state, output)
        state.optimizer_steps += 1
        if "OPTIMIZER_STEP_COMPLETED" in self._heard:
            self._fire(TrainingEvents.OPTIMIZER_STEP_COMPLETED)
        return output

    def _skip(self, state: Any, output: dict[str, Tensor]) -> dict[str, Tensor]:
        state.skipped_steps += 1
        if "OPTIMIZER_STEP_SKIPPED" in self._heard:
            self._fire(TrainingEvents.OPTIMIZER_STEP_SKIPPED)
        return output

    def _fire(self, event: TrainingEvents) -> None:
        engine = self._engine()
        assert engine is not None  # it is calling
        engine.fire_event(event)

    def _incoming(self, scale: float, loss: Tensor) -> Tensor:
        """The gradient that backward starts from: the divisor costs no node of its own."""
        factor = self._factors.get(scale)
        if factor is None or factor.dtype != loss.dtype or factor.device != loss.device:
            if len(self._factors) > 64:
                self._factors.clear()
            factor = self._factors[scale] = torch.full((), scale, dtype=loss.dtype, device=loss.device)
        return factor if self.scaler is None else self.scaler.scale(factor)

    def _clear_gradients(self) -> list[Tensor]:
        groups = 0
        for optimizer in self.optimizers.values():
            groups += len(optimizer.param_groups)
        if groups != self._group_count:
            self._group_count = groups
            self._parameters = list(_unique(self.optimizers.values()))
        for parameter in self._parameters:
            parameter.grad = None
        return self._parameters

    def _bind(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)  # no cycle: a dropped Trainer frees its model at once
        self._grouped = getattr(engine, "accumulation_steps", None) is not None
        self._heard = getattr(engine, "heard", _EVERY_EVENT)
        if not engine.has_registered_events(TrainingEvents.BACKWARD_COMPLETED):
            engine.register_events(*TrainingEvents, event_to_attr=EVENT_COUNTERS)
            engine.state.padding = engine.state.group_total = 0  # type: ignore[attr-defined]


_EVERY_EVENT = frozenset(event.name for event in TrainingEvents)


def _weighted(values: list[Tensor], scales: list[float]) -> Tensor:
    """The sum of ``values * scales``, shape ``()``; a value of scale zero is left out, as it may be NaN."""
    if 0.0 in scales:
        counted = [(value, scale) for value, scale in zip(values, scales, strict=True) if scale]
        if not counted:
            return torch.zeros_like(values[0])
        values, scales = [value for value, _ in counted], [scale for _, scale in counted]
    if len(values) == 1:
        return values[0] if scales[0] == 1.0 else values[0] * scales[0]
    if scales.count(scales[0]) == len(scales):
        summed = torch.stack(values)
        return summed.mean() if scales[0] * len(scales) == 1.0 else summed.sum() * scales[0]
    return torch.stack([value * scale for value, scale in zip(values, scales, strict=True)]).sum()


def _weighted_by_name(extras: list[Mapping[str, Tensor]], scales: list[float]) -> dict[str, Tensor]:
    names = [sorted(named) for named in extras]
    if len(extras) < len(scales) or any(each != names[0] for each in names):
        raise ValueError(
            f"loss_fn must return the same names for each micro-batch of a group, got {names} for {len(scales)} of "
            "them: return a zero, or a NaN, where there is nothing to tell."
        )
    return {name: _weighted([named[name].detach() for named in extras], scales) for name in extras[0]}


def _unique(optimizers: Iterable[Optimizer]) -> Iterable[Tensor]:
    seen: dict[int, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen.setdefault(id(parameter), parameter)
    return seen.values()
