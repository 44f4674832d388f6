"""The standard update: accumulate gradients over the micro-batches, clip, step every optimizer once."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine.checkpoint.states.generators import ModelGenerators
from ignite_engine.checkpoint.states.model_and_optimizer import (
    EvaluatedWeights,
    ModelState,
    OptimizerState,
    ParametersState,
    unwrap,
    with_modes,
)
from ignite_engine.checkpoint.states.outside import Outside
from ignite_engine.errors import check_type, is_number, shortened
from ignite_engine.events import EVENT_COUNTERS, TrainingEvents
from ignite_engine.update.accumulation import Accumulation, accumulation_of
from ignite_engine.update.base import BaseUpdate
from ignite_engine.update.device import device_of
from ignite_engine.update.losses import LossFn
from ignite_engine.update.micro_batches import Group, WeightFn, group_of
from ignite_engine.update.non_finite import NonFinitePolicy, warn_of_weights
from ignite_engine.update.parameters import Parameters, check_gradients, check_model, optimizers_by_name
from ignite_engine.update.precision import Precision, check_precision, loss_scaler
from ignite_engine.update.shortcuts import step


class Update(BaseUpdate):
    """The process function of a :class:`~ignite_engine.Trainer`; works in any Ignite engine.

    Its weights are those of the loop written by hand, bit for bit: for each micro-batch forward under autocast and
    ``(loss * scale).backward()`` outside of it, then clip, then step. No listener changes them.

    Args:
        model: plain, DDP, FSDP2 (also HSDP), tensor parallel, or a plain one with such modules in it.
        optimizer: one, or a mapping of names to several: all of them step or none does. Their parameters and groups
            are read at each update, so they may change during a run.
        loss_fn: ``loss_fn(model, batch)`` with the batch on the model's device; returns the mean over the
            micro-batch, one element, or ``(mean, {name: detached scalar})``, the same names each time.
        precision: ``fp32``, ``bf16`` or ``fp16`` (autocast; fp16 with a loss scaler); or a function that returns the
            context of a micro-batch's forward pass, such as FP8's.
        clip_norm: largest joint L2 norm of all gradients of the optimizers' parameters, in the units of the loss;
            None does not clip.
        weight_fn: weight of a micro-batch, e.g. its number of tokens, called on the host batch; None weighs each 1.
            Under DDP and FSDP2 gradients must be finite for one that weighs 0, too: the peers wait for them.
        grad_scaler: torch's GradScaler arguments, for fp16 only.
        log_grad_norm: report ``grad_norm`` also where neither ``clip_norm`` nor ``non_finite`` computes it.
        non_finite: what all ranks do where a loss or the gradient norm is not finite on any of them: ``skip`` the
            step, ``rollback`` to the last healthy checkpoint and leave the iteration out when it comes again, or
            ``stop`` the run before the weights change (:class:`NotFinite`); reads one value a step. None: nothing,
            with one warning: by MetricLogger at the first, or at the end of the run if the weights are not finite.
        max_skips: iterations that ``skip`` or ``rollback`` leaves out in a run at most; one more ends it.
        accumulate: how the gradients of a group are made. None: the ordinary way. ``rank_invariant``: with the same
            bits on any number of ranks, for ``Trainer(update, global_micro_batches=...)``; of a model in DDP the module
            inside is trained, and DDP reduces nothing. ``capture``: forward, backward, clip and step as graphs of
            ``torch.compile``, which is faster and has other bits; on one process (``docs/performance.md``). Or an
            :class:`Accumulation` of your own.
        reduce_each_micro_batch: DDP and FSDP2 reduce gradients in each backward, not in a group's last only; FSDP2
            then keeps no gradients of whole layers in between.
        loss_parallel: forward and backward run in torch's ``loss_parallel``: the cross-entropy of logits that are
            sharded by class, which are not gathered.

    ``state.output`` becomes a dict of detached device scalars: ``loss``, this rank's weighted sum, scaled so that
    its mean over ranks is the weighted mean of the whole group (on one process it is that mean); ``grad_norm``,
    before clipping; and the extra names, averaged likewise.

    Raises:
        ValueError: an argument is out of range, DDP with ``static_graph`` is asked to accumulate, or FSDP2 shards a
            table with sparse gradients.
        TypeError: an argument is of another type.
        TypeError, ValueError: loss_fn returns what cannot be trained on.
        NotFinite: by ``non_finite``; the same on all ranks.
    """

    model: nn.Module
    loss_fn: LossFn

    device: torch.device

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        loss_fn: LossFn,
        *,
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        weight_fn: WeightFn | None = None,
        grad_scaler: Mapping[str, Any] | None = None,
        log_grad_norm: bool = False,
        non_finite: str | None = None,
        max_skips: int = 10,
        accumulate: str | Accumulation | None = None,
        reduce_each_micro_batch: bool = False,
        loss_parallel: bool = False,
    ) -> None:
        check_type("model", model, isinstance(model, nn.Module), "a module")
        check_model(model)
        check_type("loss_fn", loss_fn, callable(loss_fn), "a function loss_fn(model, batch)")
        if getattr(loss_fn, "__module__", None) in ("torch.nn.functional", "torch.nn.modules.loss"):
            criterion = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            raise TypeError(
                f"loss_fn must be a function loss_fn(model, batch), got {criterion}, which takes predictions and "
                "targets: write one that calls it, such as lambda model, batch: criterion(model(batch[0]), batch[1])."
            )
        check_type("weight_fn", weight_fn, weight_fn is None or callable(weight_fn), "a function of a batch, or None")
        check_type("clip_norm", clip_norm, clip_norm is None or is_number(clip_norm), "a number or None")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, or None for no clipping, got {clip_norm}.")
        self.accumulation = accumulation_of(accumulate)
        self.rank_invariant = self.accumulation.rank_invariant
        self.model = model = self.accumulation.trained(model)
        self.loss_fn = loss_fn
        self.optimizers = optimizers_by_name(optimizer)
        self.weight_fn = weight_fn
        self.precision: Precision = precision if callable(precision) else check_precision(precision)
        self.clip_norm, self.log_grad_norm = clip_norm, log_grad_norm
        self.device = device_of(model)
        self.scaler = loss_scaler(precision, self.device.type, grad_scaler)
        self.non_finite = None if non_finite is None else NonFinitePolicy(non_finite, max_skips)
        self.stepping = False
        self.reduce_each_micro_batch, self.loss_parallel = reduce_each_micro_batch, loss_parallel
        self.parameters = Parameters(self.optimizers)
        held = weakref.ref(self)  # no circle: a trainer that is dropped frees its model at once
        self.generators = ModelGenerators(lambda: held().model)  # type: ignore[union-attr]  # it is asked by this
        self._has_gradients = False
        self._outside: Outside | None = None
        """What the model holds beside its state_dict, as of the first iteration: by then caches are made."""
        self.accumulation.bind(self)

    def __call__(self, engine: Engine, batch: Any) -> dict[str, Tensor]:
        """Do one update with ``batch``: a list of micro-batches where the engine groups them, else the loader's."""
        state: Any = engine.state
        if not hasattr(state, "group"):  # an engine of Ignite's own
            if self.rank_invariant:
                raise ValueError(
                    "A rank-invariant Update needs Trainer(update, global_micro_batches=...), "
                    f"got a {type(engine).__name__}."
                )
            if not engine.has_registered_events(TrainingEvents.BACKWARD_COMPLETED):
                engine.register_events(*TrainingEvents, event_to_attr=EVENT_COUNTERS)
        scaler, policy, handlers = self.scaler, self.non_finite, engine._event_handlers
        if policy is not None:
            if state.iteration in policy.journal:
                return self._skip(engine, {"loss": torch.full((), math.nan, device=self.device)})
            policy.keep(self.model.buffers())
        group = batch if isinstance(batch, Group) else group_of(engine, batch)
        scales = self.accumulation.scales(engine, group)
        if scales is None:
            self.parameters.clear_gradients()
            return self._skip(engine, {"loss": torch.zeros((), device=self.device)})
        output = self.accumulate(engine, group, scales)
        if not self._has_gradients:
            if not isinstance(output, dict) or "loss" not in output:
                raise ValueError(f"accumulate() must return a dict with 'loss', got {output!r}.")
            check_gradients(self.optimizers, unwrap(self.model).parameters())
            self._has_gradients, self._outside = True, Outside(self.model)
        finite = scaler is None or scaler.unscale_all(self.optimizers.values())
        if handlers.get(TrainingEvents.OPTIMIZER_STEP_STARTED):
            engine._fire_event(TrainingEvents.OPTIMIZER_STEP_STARTED)
        stepped, norm = self.accumulation.clip_and_step()
        if norm is not None:
            output["grad_norm"] = norm
        # of the gradients an overflow is the scaler's to skip
        if policy is not None and not policy.takes(engine, output["loss"], norm if scaler is None else None):
            if scaler is not None:
                scaler.adjust(scaler.get_scale())
            return self._skip(engine, output)
        if finite:
            self.stepping = True
            if not stepped:
                for optimizer in self.optimizers.values():
                    step(optimizer)
            self.stepping = False
        if scaler is not None:
            scaler.adjust()
        if not finite:
            return self._skip(engine, output)
        state.optimizer_steps += 1
        if handlers.get(TrainingEvents.OPTIMIZER_STEP_COMPLETED):
            engine._fire_event(TrainingEvents.OPTIMIZER_STEP_COMPLETED)
        return output

    def accumulate(self, engine: Engine, micro_batches: Sequence[Any], scales: list[float]) -> dict[str, Tensor]:
        """Leave the gradients of one group in ``parameter.grad``; called once in each iteration, before the step.

        Override it for an update of your own: two passes in a step (SAM), noise, gradient surgery. Clipping, the step,
        its events, ``non_finite`` and the checkpoint stay as they are. Each call clears the gradients, and runs forward
        and backward of every micro-batch, with their events.

        Args:
            micro_batches: of this rank, as the loader gave them.
            scales: the factor of each micro-batch's mean loss: summed, and averaged over ranks, these losses are the
                weighted mean of the group.

        Returns:
            What ``state.output`` becomes: ``loss``, and others by name; detached tensors of shape ``()`` that nothing
            writes to later.

        The gradients are reduced over the ranks; in fp16 they are still multiplied by ``scaler.get_scale()``. Clone
        those that you keep. Random numbers of torch's generators resume exactly; an object with a state of its own
        belongs into :meth:`stateful`.
        """
        self.parameters.clear_gradients()
        return self.accumulation(engine, micro_batches, scales)

    def stateful(self) -> Iterator[tuple[str, Any, bool]]:
        """The objects to save: name, object with a state, and whether every rank has the same."""
        yield "model", ModelState(self.model), True
        outside = ParametersState(self.model, self.optimizers, self.loss_fn)
        for name, optimizer in self.optimizers.items():
            label = name if name == "optimizer" else f"optimizer/{name}"
            yield label, OptimizerState(optimizer, self.model, outside, label), True
        outside.is_saved = bool(outside.tensors())
        if outside.is_saved:
            yield "parameters", outside, True
        if self.generators.found():
            yield "generators", self.generators, False
        if self.scaler is not None:
            yield "scaler", self.scaler, True
        if self.non_finite is not None:
            yield "non_finite", self.non_finite, True
        evaluated = EvaluatedWeights(self.model, self.optimizers.values())
        if evaluated.optimizers:
            yield "evaluated", evaluated, True
        yield from self.accumulation.stateful()

    def unsaved(self) -> list[str]:
        changed = [] if self._outside is None else self._outside.changed()
        if not changed:
            return []
        return [f"the model keeps {shortened(changed)} beside its state_dict (register_buffer() saves a tensor)"]

    def run_started(self) -> None:
        """Called when a run starts; a collective."""
        self.stepping = self._has_gradients = False
        self._outside = None
        for optimizer in with_modes(self.optimizers.values()):
            optimizer.train()
        self.accumulation.run_started()

    def run_ended(self, engine: Engine) -> None:
        """A run has ended without an error; warns if its numbers went wrong without a warning. A collective."""
        state: Any = engine.state
        if state.not_finite_at is None:
            warn_of_weights(self.parameters.all(), state.iteration)

    def _skip(self, engine: Engine, output: dict[str, Tensor]) -> dict[str, Tensor]:
        state: Any = engine.state
        state.skipped_steps += 1
        if engine._event_handlers.get(TrainingEvents.OPTIMIZER_STEP_SKIPPED):
            engine._fire_event(TrainingEvents.OPTIMIZER_STEP_SKIPPED)
        return output
