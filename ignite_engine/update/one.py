"""One iteration's work: forward and backward over the micro-batches, clip, one step of every optimizer; or several."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine.errors import check_type, did_you_mean, is_number, is_whole
from ignite_engine.events import EVENT_COUNTERS, TrainingEvents
from ignite_engine.ranks import agreement
from ignite_engine.states.model_and_optimizer import ModelState, OptimizerState, ParametersState, unwrap
from ignite_engine.step import out_of_memory
from ignite_engine.step.backward import backward
from ignite_engine.step.device import device_of, to_device
from ignite_engine.step.gradients import check_tables, clip_gradients, gradient_norm
from ignite_engine.step.invariant import RankInvariance
from ignite_engine.step.loss_parallel import loss_parallel_context
from ignite_engine.step.losses import LossFn, parts, scalar, unusable_result, weighted, weighted_by_name
from ignite_engine.step.micro_batches import (
    Group,
    GroupWeights,
    WeightFn,
    check_accumulates,
    micro_batch_scales,
    reducing_modules,
    without_sync,
)
from ignite_engine.step.non_finite import FirstNonFinite, NonFinitePolicy, warn_of_first
from ignite_engine.step.optimizer_step import needs_closure, step
from ignite_engine.step.precision import LossScaler, Precision, autocast, check_precision, loss_scaler
from ignite_engine.step.rank_local import inside_ddp
from ignite_engine.step.reported import GroupMean, Reported, unread
from ignite_engine.step.without_trace import without_rows, without_trace

logger = logging.getLogger(__name__)
_OF_A_MICRO_BATCH = (
    TrainingEvents.FORWARD_STARTED,
    TrainingEvents.FORWARD_COMPLETED,
    TrainingEvents.BACKWARD_COMPLETED,
)


class Update:
    """The process function of a :class:`~ignite_engine.Trainer`; works in any Ignite engine.

    Its weights are those of the loop written by hand, bit for bit: for each micro-batch forward under autocast and
    ``(loss * scale).backward()`` outside of it, then clip, then step. No listener changes them.

    Args:
        model: plain, DDP, FSDP2 (also HSDP), tensor parallel, or a plain one with such modules in it.
        optimizer: one, or a mapping of names to several: all of them step or none does. Their parameters and groups
            are read at each update, so they may change during a run.
        loss_fn: ``loss_fn(model, batch)`` with the batch on the model's device; returns the mean over the
            micro-batch, one element, or ``(mean, {name: detached scalar})``, the same names each time. In the place of
            the mean may be several losses by name, in a dict or a named tuple: they are summed in their order, and each
            is reported as ``loss/<name>``. None of them may be called ``loss``.
        precision: ``fp32``, ``bf16`` or ``fp16`` (autocast; fp16 with a loss scaler); or a function that returns the
            context of a micro-batch's forward pass, such as FP8's.
        clip_norm: largest joint L2 norm of all gradients of the optimizers' parameters, in the units of the loss;
            None does not clip.
        weight_fn: weight of a micro-batch, e.g. its number of tokens, called on the host batch; None weighs each 1.
            Under DDP and FSDP2 gradients must be finite for one that weighs 0, too: the peers wait for them.
        grad_scaler: torch's GradScaler arguments, for fp16 only.
        log_grad_norm: report ``grad_norm`` also where nothing is clipped.
        non_finite: what all ranks do where a loss or the gradient norm is not finite on any of them: ``skip`` the
            step, ``rollback`` to the last healthy checkpoint and leave the iteration out when it comes again, or
            ``stop`` the run before the weights change (:class:`NotFinite`); reads one value a step. None: nothing,
            with one warning at the first, by MetricLogger or at the end of the run.
        max_skips: iterations that ``skip`` or ``rollback`` leaves out in a run at most; one more ends it.
        rank_invariant: the same bits on any number of ranks, for ``Trainer(update, global_micro_batches=...)``; of a
            model in DDP the module inside is trained, and DDP reduces nothing.
        reduce_each_micro_batch: DDP and FSDP2 reduce gradients in each backward, not in a group's last only; FSDP2
            then keeps no gradients of whole layers in between.
        loss_parallel: forward and backward run in torch's ``loss_parallel``: the cross-entropy of logits that are
            sharded by class, which are not gathered.

    ``state.output`` becomes a dict of detached device scalars: ``loss``, this rank's weighted sum, scaled so that
    its mean over ranks is the weighted mean of the whole group (on one process it is that mean); ``grad_norm``,
    before clipping; and the extra names, averaged likewise. The mean of a group's losses is computed when it is read.

    Raises:
        ValueError: an argument is out of range, DDP with ``static_graph`` is asked to accumulate, or FSDP2 shards a
            table with sparse gradients.
        TypeError: an argument is of another type.
        TypeError, ValueError: loss_fn returns what cannot be trained on.
        NotFinite: by ``non_finite``; the same on all ranks.
    """

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
        rank_invariant: bool = False,
        reduce_each_micro_batch: bool = False,
        loss_parallel: bool = False,
    ) -> None:
        check_type("model", model, isinstance(model, nn.Module), "a module")
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
        self.model = inside_ddp(model) if rank_invariant else model
        self.optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}
        if not self.optimizers:
            raise ValueError("optimizer must hold at least one optimizer, got an empty mapping.")
        for name, each in self.optimizers.items():
            check_type("an optimizer's name", name, isinstance(name, str), "a word")
            label = f"optimizer[{name!r}]" if isinstance(optimizer, Mapping) else "optimizer"
            is_optimizer = hasattr(each, "param_groups") and hasattr(each, "step")
            check_type(label, each, is_optimizer, "an optimizer, or a mapping of names to several")
            if needs_closure(each):
                raise ValueError(
                    f"{type(each).__name__} needs a closure that computes the loss again, which Update does not give: "
                    "write update(engine, batch) yourself and call its step(closure) there."
                )
        self.loss_fn, self.weight_fn = loss_fn, weight_fn
        self.precision: Precision = precision if callable(precision) else check_precision(precision)
        self.clip_norm, self.log_grad_norm = clip_norm, log_grad_norm
        self.device = device_of(model)
        self._invariance = RankInvariance(self.model, self._parameters, self.device) if rank_invariant else None
        self._on_host = self.device.type == "cpu"
        self.scaler = loss_scaler(precision, self.device.type, grad_scaler)
        self.non_finite = None if non_finite is None else NonFinitePolicy(non_finite, max_skips)
        self._losses = FirstNonFinite()
        self.stepping = False
        """An optimizer's step has begun and not all have ended: the weights are of no iteration."""
        self._has_gradients = False
        self.reduce_each_micro_batch, self.loss_parallel = reduce_each_micro_batch, loss_parallel
        self._reducing = reducing_modules(self.model)
        self._is_fsdp = any(hasattr(each, "set_requires_gradient_sync") for each in self._reducing)
        if self._is_fsdp:
            check_tables(self.model)
        self._broken_off = False
        # one context for good: making one costs more than entering it
        self._autocast = autocast(precision, self.device.type)
        self._factors: dict[float, Tensor] = {}
        self._scales: dict[tuple[int, int, int], list[float]] = {}

    def __call__(self, engine: Engine, batch: Any) -> dict[str, Tensor]:
        """Do one update with ``batch``: a list of micro-batches where the engine groups them, else the loader's."""
        state: Any = engine.state
        if not hasattr(state, "padding"):
            if self.rank_invariant:
                raise ValueError(
                    "Update(rank_invariant=True) needs Trainer(update, global_micro_batches=...), "
                    f"got a {type(engine).__name__}."
                )
            _prepare_plain_engine(engine)
        grouped = getattr(engine, "accumulation_steps", None) is not None
        if self.non_finite is not None:
            if self.non_finite.leaves_out(state.iteration):
                return self._skip(engine, {"loss": torch.full((), math.nan, device=self.device)})
            self.non_finite.keep(self.model.buffers())
        micro_batches = batch if grouped or isinstance(batch, Group) else (batch,)
        if self._invariance is None:
            scales = self._scales_of(batch, micro_batches, state)
        else:
            scales = self._begin_invariant(self._invariance, engine, micro_batches)
        self._clear_gradients()
        if scales is None:
            return self._skip(engine, {"loss": torch.zeros((), device=self.device)})
        if self._invariance is not None:
            return self._step(engine, self._accumulate_in_memory(engine, micro_batches, scales))
        if not self._reducing and 0.0 in scales and any(scales):
            # the mean over nothing may be NaN, and stays NaN times zero; in a wrapped model the peers wait for it
            micro_batches = [each for each, scale in zip(micro_batches, scales, strict=True) if scale]
            scales = [scale for scale in scales if scale]
        return self._step(engine, self._accumulate_in_memory(engine, micro_batches, scales))

    @property
    def rank_invariant(self) -> bool:
        """Whether weights and losses have the same bits on any number of ranks."""
        return self._invariance is not None

    def stateful(self) -> Iterator[tuple[str, Any, bool]]:
        """What a checkpoint holds of this: name, object with a state, and whether every rank has the same."""
        yield "model", ModelState(self.model), True
        outside = ParametersState(self.model, self.optimizers, self.loss_fn)
        for name, optimizer in self.optimizers.items():
            label = name if name == "optimizer" else f"optimizer/{name}"
            yield label, OptimizerState(optimizer, self.model, outside, label), True
        outside.is_saved = bool(outside.tensors())
        if outside.is_saved:
            yield "parameters", outside, True
        if self.scaler is not None:
            yield "scaler", self.scaler, True
        if self.non_finite is not None:
            yield "non_finite", self.non_finite, True
        if self._invariance is not None:
            yield "rank_invariant", self._invariance, True

    def run_starts(self) -> None:
        """A run starts: what depends on the number of ranks is computed again."""
        self._scales.clear()
        self.stepping = self._has_gradients = False
        self._losses.clear()
        if self._invariance is not None:
            self._invariance.start()

    def run_ended(self, engine: Engine) -> None:
        """A run has ended without an error: one warning if it went wrong and nobody has said so; a collective."""
        state: Any = engine.state
        if state.not_finite_at is None:
            state.not_finite_at = warn_of_first(self._losses, self._parameters(), state.iteration)

    def _scales_of(self, batch: Any, micro_batches: Any, state: Any) -> list[float] | None:
        weights: GroupWeights | None = state.group_weights
        if weights is not None and weights.batch is batch:  # else a handler has given another one
            return weights.scales()
        key = len(micro_batches), state.padding, state.group_total
        scales = self._scales.get(key)
        if scales is None:
            scales = micro_batch_scales(
                micro_batches, padding=state.padding, group_total=state.group_total, weight_fn=self.weight_fn
            )
            if self.weight_fn is None and scales is not None:
                self._scales[key] = scales
        return scales

    def _accumulate_in_memory(self, engine: Engine, micro_batches: Any, scales: list[float]) -> dict[str, Tensor]:
        """Accumulate; where a micro-batch does not fit into the memory of one process, again with smaller ones."""
        state: Any = engine.state
        if self.device.type in out_of_memory.NEVER_ON and state.micro_batch_limit is None:
            return self._accumulate(engine, micro_batches, scales)
        before, counted = out_of_memory.Generators(self.device), state.micro_batches
        while True:
            pieces, shares = micro_batches, scales
            if state.micro_batch_limit is not None and self._invariance is None:
                pieces, shares = out_of_memory.split(micro_batches, scales, state.micro_batch_limit, self.weight_fn)
            try:
                return self._accumulate(engine, pieces, shares)
            except torch.OutOfMemoryError as error:
                batch = pieces[state.micro_batches - counted]
                # else peers wait for this rank's reduction, or the bits are those of whole micro-batches
                alone = agreement.world_size() == 1 and not self._reducing and self._invariance is None
                limit = out_of_memory.halved(batch) if alone else None
                if limit is None:
                    raise out_of_memory.refusal(error, batch, state.iteration) from error
                logger.warning("%s", out_of_memory.report(batch, limit, state.iteration, self.model))
            # here the error is gone, and with it what its frames have held
            state.micro_batch_limit, state.micro_batches = limit, counted
            self._clear_gradients()
            del batch, pieces
            out_of_memory.free()
            before.restore()

    def _accumulate(self, engine: Engine, micro_batches: Any, scales: list[float]) -> dict[str, Tensor]:
        """Forward and backward of each micro-batch; the weighted means of what they report."""
        if self._invariance is not None:
            return self._accumulate_invariant(self._invariance, engine, micro_batches, scales)
        state: Any = engine.state
        defers = self._reducing if len(scales) > 1 and not self.reduce_each_micro_batch else ()
        for module in defers:
            check_accumulates(module)
        if self._broken_off:
            raise RuntimeError(
                "An update of this FSDP2 model raised, and FSDP2 keeps the gradients that it had by then: make the "
                "model, its optimizer and Update again before you train on."
            )
        self._broken_off = self._is_fsdp
        losses: list[Tensor] = []
        extras: list[Mapping[str, Tensor]] = []
        # between two steps of the optimizer each further call costs microseconds
        listeners = [engine._event_handlers[event] for event in _OF_A_MICRO_BATCH]
        _, _, after_backward = listeners
        in_contexts, one_micro_batch = bool(defers) or self.loss_parallel, self._backward
        for batch in micro_batches if self._on_host else to_device(micro_batches, self.device, state.iteration):
            scale = scales[len(losses)]
            if in_contexts or not scale:
                repeated = not scale and len(losses) >= len(scales) - state.padding
                is_last = len(losses) == len(scales) - 1
                with (
                    without_sync(() if is_last else defers),
                    loss_parallel_context(self.loss_parallel),
                    without_trace(self.model) if repeated else nullcontext(),
                    nullcontext() if scale else without_rows(self._parameters()),
                ):
                    losses.append(one_micro_batch(engine, batch, scale, extras, listeners))
            else:
                losses.append(one_micro_batch(engine, batch, scale, extras, listeners))
            state.micro_batches += 1
            if after_backward:
                engine.fire_event(TrainingEvents.BACKWARD_COMPLETED)
        self._broken_off = False
        output = {"loss": weighted(losses, scales)} if len(losses) == 1 else Reported(loss=GroupMean(losses, scales))
        if extras:
            output.update(weighted_by_name(extras, scales))
        return output

    def _begin_invariant(self, invariance: RankInvariance, engine: Any, micro_batches: Any) -> list[float] | None:
        return invariance.begin(
            micro_batches,
            iteration=engine.state.iteration,
            full=engine.global_micro_batches,
            total=engine.state.group_total or len(micro_batches),
            weight_fn=self.weight_fn,
        )

    def _accumulate_invariant(
        self, invariance: RankInvariance, engine: Engine, micro_batches: Any, scales: list[float]
    ) -> dict[str, Tensor]:
        """As :meth:`_accumulate`; one that weighs nothing is left out."""
        state: Any = engine.state
        losses: list[Tensor] = []
        extras: list[Mapping[str, Tensor]] = []
        listeners = [engine._event_handlers[event] for event in _OF_A_MICRO_BATCH]
        with invariance.collecting():
            for index, batch in enumerate(to_device(micro_batches, self.device, state.iteration)):
                if scales[index]:
                    invariance.before(index)
                    losses.append(self._backward(engine, batch, scales[index], extras, listeners))
                state.micro_batches += 1
                if engine._event_handlers.get(TrainingEvents.BACKWARD_COMPLETED):
                    engine.fire_event(TrainingEvents.BACKWARD_COMPLETED)
                invariance.after(index)
        if not losses and self.scaler is not None:  # it makes its scale in its first use, which is that of its peers
            self.scaler.scale(torch.zeros((), device=self.device))
        return invariance.reduce(losses, extras)

    def _backward(
        self, engine: Engine, batch: Any, scale: float, extras: list[Mapping[str, Tensor]], listeners: Any
    ) -> Tensor:
        """Forward and backward of one micro-batch on the device; its mean loss, detached."""
        started, completed, _ = listeners
        if started:
            engine.fire_event(TrainingEvents.FORWARD_STARTED)
        with self._autocast:
            result: Any = self.loss_fn(self.model, batch)
        if completed:
            engine.fire_event(TrainingEvents.FORWARD_COMPLETED)
        try:
            loss, extra = (result, None) if type(result) is Tensor else parts(result)
            if loss.dim():
                loss = loss.reshape(())
            backward(loss, self._incoming(scale, loss))
            if extra is not None:
                extras.append({name: scalar(value) for name, value in extra.items()})
            return scalar(loss)
        except Exception as error:
            if (unusable := unusable_result(result)) is not None:
                raise ValueError(unusable) from error
            raise

    def _step(self, engine: Engine, output: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._has_gradients:
            self._check_gradients()
        finite = self.scaler is None or self.scaler.unscale_all(self.optimizers.values())
        handlers = engine._event_handlers
        if handlers.get(TrainingEvents.OPTIMIZER_STEP_STARTED):
            engine.fire_event(TrainingEvents.OPTIMIZER_STEP_STARTED)
        norm = None
        if self.clip_norm is not None:
            norm = output["grad_norm"] = clip_gradients(self._parameters(), self.clip_norm)
        elif self.log_grad_norm or (self.non_finite is not None and self.scaler is None):
            norm = gradient_norm([p.grad for p in self._parameters() if p.grad is not None])
            if self.log_grad_norm:
                output["grad_norm"] = norm
        if self.non_finite is not None and not self._is_finite(engine, output["loss"], norm):
            return self._skip(engine, output)
        self._losses.add(engine.state.iteration, unread(output, "loss"))
        if finite:
            self.stepping = True
            for optimizer in self.optimizers.values():
                step(optimizer)
            self.stepping = False
        if self.scaler is not None:
            self.scaler.adjust()
        if not finite:
            return self._skip(engine, output)
        state: Any = engine.state
        state.optimizer_steps += 1
        if handlers.get(TrainingEvents.OPTIMIZER_STEP_COMPLETED):
            engine.fire_event(TrainingEvents.OPTIMIZER_STEP_COMPLETED)
        return output

    def _is_finite(self, engine: Engine, loss: Tensor, norm: Tensor | None) -> bool:
        """Whether this step is taken by the policy of values that are not finite; a collective."""
        assert self.non_finite is not None
        norm = norm if self.scaler is None else None  # an overflow is the scaler's to skip
        if self.non_finite.is_finite(loss, norm):
            return True
        if self.scaler is not None:
            self.scaler.discard()
        self.non_finite.act(engine, loss, norm)
        return False

    def _skip(self, engine: Engine, output: dict[str, Tensor]) -> dict[str, Tensor]:
        state: Any = engine.state
        state.skipped_steps += 1
        if engine._event_handlers.get(TrainingEvents.OPTIMIZER_STEP_SKIPPED):
            engine.fire_event(TrainingEvents.OPTIMIZER_STEP_SKIPPED)
        return output

    def _check_gradients(self) -> None:
        """At a run's first step: an optimizer of another model's parameters would train nothing, silently."""
        own = {id(parameter) for parameter in unwrap(self.model).parameters()}
        idle = []
        for name, optimizer in self.optimizers.items():
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if held and all(parameter.grad is None and id(parameter) not in own for parameter in held):
                idle.append(f"{name} ({type(optimizer).__name__})")
        if idle:
            message = (
                f"{', '.join(idle)} holds no parameter of the model, and none of its own got a gradient in the first "
                "step: make it from the parameters() of the model that Update is given."
            )
            if len(idle) == len(self.optimizers):
                raise ValueError(message)
            logger.warning("%s", message)  # it may be meant to begin later
        self._has_gradients = True

    def _incoming(self, scale: float, loss: Tensor) -> Tensor:
        """The gradient that backward starts from: that of ``scaler.scale(loss * scale)``, without its two nodes."""
        if self.scaler is not None:
            return self.scaler.scale(torch.ones((), device=loss.device)).to(loss.dtype) * scale
        factor = self._factors.get(scale)
        if factor is None or factor.dtype != loss.dtype or factor.device != loss.device:
            if len(self._factors) > 64:
                self._factors.clear()
            factor = self._factors[scale] = torch.full((), scale, dtype=loss.dtype, device=loss.device)
        return factor

    def _clear_gradients(self) -> None:
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _parameters(self) -> list[Tensor]:
        """Each parameter of the optimizers once, in their order."""
        groups = (group for optimizer in self.optimizers.values() for group in optimizer.param_groups)
        return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


class Updates:
    """The process function of a :class:`~ignite_engine.Trainer` whose iteration is several updates of one model.

    Each has its own loss, optimizer, precision and clipping, and is made of the same group of micro-batches, in the
    order of the mapping. A GAN is a module with both networks in it::

        Updates({
            "discriminator": Update(gan, discriminator_optimizer, discriminator_loss),
            "generator": Update(gan, generator_optimizer, generator_loss),
        }, every={"generator": 5})

    Args:
        updates: by name; all of the same model. An optimizer of one leaves the parameters of the others alone, whatever
            gradients they get; its own are cleared before its update.
        every: iterations from one update of that name to the next; 1 where it is not given. With 5 it is made in
            iterations 5, 10, ...: its peers are made five times for each of it.

    ``state.output`` holds what each reports, under ``<name>/``: ``generator/loss``. The events of the optimizer step
    fire for each update, and ``optimizer_steps`` counts them all; :meth:`stepped` is the event of one. An
    :class:`~ignite_engine.handlers.LRSchedule` steps with its own optimizer. A checkpoint holds the model once and, of
    each update, the optimizer (``optimizer/generator``) and whatever else it saves.

    Raises:
        ValueError: they have not one model, share an optimizer, have different weights, or use ``non_finite`` or
            ``rank_invariant``; an ``every`` is below 1 or of no update.
    """

    def __init__(self, updates: Mapping[str, Update], *, every: Mapping[str, int] | None = None) -> None:
        if not updates:
            raise ValueError("updates must hold at least one Update, got an empty mapping.")
        for name, update in updates.items():
            check_type(f"updates[{name!r}]", update, isinstance(update, Update), "an Update")
        self.updates = dict(updates)
        self.every = dict.fromkeys(updates, 1)
        for name, number in (every or {}).items():
            if name not in updates:
                raise ValueError(f"every has {name!r}, which is no update{did_you_mean(name, updates)}")
            if not is_whole(number) or number < 1:
                raise ValueError(f"every[{name!r}] must be a number of iterations of at least 1, got {number!r}.")
            self.every[name] = number
        self.turn: str | None = None
        """The update that is being made; None between them."""
        first = next(iter(self.updates.values()))
        self.model: nn.Module = first.model
        self.weight_fn: WeightFn | None = first.weight_fn
        self.device = first.device
        self.optimizers: dict[str, Optimizer] = {}
        for name, update in self.updates.items():
            self._check(name, update)
            for label, optimizer in update.optimizers.items():
                if any(optimizer is other for other in self.optimizers.values()):
                    raise ValueError(f"updates[{name!r}] has an optimizer of another one: give each its own.")
                self.optimizers[name if label == "optimizer" else f"{label}/{name}"] = optimizer

    def _check(self, name: str, update: Update) -> None:
        if update.model is not self.model:
            raise ValueError(
                f"updates[{name!r}] has a model of its own: put the networks into one module, as its attributes, and "
                "give it to each Update."
            )
        if update.weight_fn is not self.weight_fn:
            raise ValueError(f"updates[{name!r}] has another weight_fn than the first: a micro-batch has one weight.")
        if update.non_finite is not None or update.rank_invariant:
            setting = "rank_invariant" if update.rank_invariant else "non_finite"
            raise ValueError(f"updates[{name!r}] uses {setting}, which is for a single Update: leave it out.")

    def __call__(self, engine: Engine, batch: Any) -> dict[str, Tensor]:
        """Make the updates that are due in this iteration."""
        output = Reported()
        iteration = engine.state.iteration
        try:
            for name, update in self.updates.items():
                if iteration % self.every[name] == 0:
                    self.turn = name
                    output.update({f"{name}/{key}": value for key, value in dict.items(update(engine, batch))})
        finally:
            self.turn = None
        return output

    def stepped(self, which: str | Optimizer) -> Any:
        """The event that an update's optimizers have stepped.

        Args:
            which: the update's name, or an optimizer of it.

        Raises:
            ValueError: there is none.
        """
        for name, update in self.updates.items():
            if which == name or any(which is each for each in update.optimizers.values()):
                return TrainingEvents.OPTIMIZER_STEP_COMPLETED(event_filter=partial(self._is_turn_of, name))
        raise ValueError(
            f"got {which!r}, expected an update's name or its optimizer; known: {', '.join(self.updates)}."
        )

    def _is_turn_of(self, name: str, engine: Engine, count: int) -> bool:
        return self.turn == name

    @property
    def scaler(self) -> LossScaler | None:
        """That of the first update that has one."""
        return next((each.scaler for each in self.updates.values() if each.scaler is not None), None)

    @property
    def stepping(self) -> bool:
        """An optimizer's step has begun and not all have ended."""
        return any(each.stepping for each in self.updates.values())

    def stateful(self) -> Iterator[tuple[str, Any, bool]]:
        """What a checkpoint holds of this: name, object with a state, and whether every rank has the same."""
        for turn, update in self.updates.items():
            for name, obj, shared in update.stateful():
                if name != "model":
                    name = f"{name}/{turn}"
                elif update is not next(iter(self.updates.values())):
                    continue
                if isinstance(obj, OptimizerState):
                    obj.part = name
                yield name, obj, shared

    def run_starts(self) -> None:
        """A run starts: what depends on the number of ranks is computed again."""
        for update in self.updates.values():
            update.run_starts()

    def run_ended(self, engine: Engine) -> None:
        """A run has ended without an error: one warning if one of them went wrong; a collective."""
        for update in self.updates.values():
            update.run_ended(engine)


def _prepare_plain_engine(engine: Engine) -> None:
    if not engine.has_registered_events(TrainingEvents.BACKWARD_COMPLETED):
        engine.register_events(*TrainingEvents, event_to_attr=EVENT_COUNTERS)
    engine.state.micro_batch_limit = None  # type: ignore[attr-defined]
    engine.state.group_weights = None  # type: ignore[attr-defined]
    engine.state.padding = engine.state.group_total = 0  # type: ignore[attr-defined]
