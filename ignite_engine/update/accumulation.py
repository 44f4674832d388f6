"""Computes the gradients of a group of micro-batches; strategies from outside override parts of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_engine.errors import by_name, check_type, one_line, shapes_of
from ignite_engine.events import TrainingEvents
from ignite_engine.ranks import agreement, mesh
from ignite_engine.update.device import one_ahead
from ignite_engine.update.losses import names_of, parts, scalar, weighted
from ignite_engine.update.micro_batches import (
    Group,
    check_accumulates,
    check_weight,
    reducing_modules,
    scales_of,
    without_sync,
)
from ignite_engine.update.parameters import clip_gradients
from ignite_engine.update.precision import autocast
from ignite_engine.update.shortcuts import backward
from ignite_engine.update.without_trace import without_rows, without_trace

if TYPE_CHECKING:
    from ignite_engine.update.one import Update

ACCUMULATIONS = {
    "capture": "ignite_engine.ext.capture:Capture",
    "rank_invariant": "ignite_engine.ext.rank_invariant:RankInvariant",
}
"""What ``Update(accumulate=...)`` takes by name: the class, which is imported when it is used."""

Listeners = tuple[list[Any], list[Any], list[Any]]
"""Ignite's lists of the handlers before a forward, after it, and after its backward."""


class Accumulation:
    """The ordinary way, micro-batch after micro-batch; a subclass, ``Update(accumulate=...)``, overrides a part of it.

    Called with the micro-batches of this rank and their scales it leaves the sum of the scaled gradients, reduced over
    the ranks, in ``parameter.grad``. One object serves one :class:`~ignite_engine.Update`, which is its ``update``.
    """

    rank_invariant = False
    """The same bits on any number of ranks: the trainer needs ``global_micro_batches``, a rank may have none of a
    group, and what is reported is the mean over all ranks."""
    update: Update

    def trained(self, model: nn.Module) -> nn.Module:
        """The module that is trained, of the model given to Update."""
        return model

    def bind(self, update: Update) -> None:
        """Belong to an Update that has been built; ``super().bind(update)`` first.

        Raises:
            ValueError: it cannot be done with this one.
        """
        # which holds this: a trainer that is dropped frees its model at once
        self.update = weakref.proxy(update)  # type: ignore[assignment]  # it answers for it
        self._reducing = reducing_modules(update.model)
        self._broken_off = False
        # one context for good, which costs more to make than to enter
        self._autocast = None if callable(update.precision) else autocast(update.precision, update.device.type)

    def stateful(self) -> Iterable[tuple[str, Any, bool]]:
        """The objects to save: name, object with a state, and whether every rank has the same."""
        return ()

    def check(self) -> None:
        """Refuse what cannot be trained so, with the model in the mode in which it will be trained.

        Raises:
            ValueError: why, and how to change it.
        """

    def run_started(self) -> None:
        """Called when a run starts; a collective."""

    def scales(self, engine: Any, group: Group) -> list[float] | None:
        """The factor of the mean loss of each micro-batch of a group; None: nothing in it weighs anything.

        A collective with ``weight_fn``, unless the ranks have agreed before.

        Raises:
            ValueError: a weight is negative or not finite, or their sum is not.
        """
        if (weight_fn := self.update.weight_fn) is None:
            real = len(group) - group.padding
            scale = mesh.data_size() / group.total if group.total else 1.0 / max(real, 1)
            return [scale] * real + [0.0] * group.padding
        weights, total = group.weights, group.total_weight
        if weights is None:
            weights = [check_weight(weight_fn(batch)) for batch in group.real] + [0.0] * group.padding
            total = sum(row[0] for row in mesh.by_data_rank(agreement.gather_floats([sum(weights)])))
        return scales_of(weights, total, mesh.data_size())

    def __call__(self, engine: Engine, micro_batches: Sequence[Any], scales: Sequence[float]) -> dict[str, Tensor]:
        """Leave the gradients in the parameters, which have none; returns what ``state.output`` becomes.

        Raises:
            ValueError: the model cannot accumulate, or loss_fn returned what cannot be trained on.
            RuntimeError: an earlier update of an FSDP2 model raised.
        """
        state: Any = engine.state
        update = self.update
        padding = getattr(micro_batches, "padding", 0)
        if 0.0 in scales and any(scales) and not self._reducing:
            # the mean over nothing may be NaN, and stays NaN times zero; in a wrapped model the peers wait for it
            micro_batches, scales = [*compress(micro_batches, scales)], [*filter(None, scales)]
        deferring = () if update.reduce_each_micro_batch or len(scales) == 1 else self._reducing
        for module in deferring:
            check_accumulates(module)
        if self._broken_off:
            raise RuntimeError(
                "An update of this FSDP2 model raised, and FSDP2 keeps the gradients that it had by then: make the "
                "model, its optimizer and Update again before you train on."
            )
        self._broken_off = any(map(mesh.is_sharded, self._reducing))
        handlers = engine._event_handlers
        # looked up once: a handler that comes or goes in the middle of the group changes the same lists
        listeners: Listeners = (
            handlers[TrainingEvents.FORWARD_STARTED],
            handlers[TrainingEvents.FORWARD_COMPLETED],
            handlers[TrainingEvents.BACKWARD_COMPLETED],
        )
        losses, extras = list[Tensor](), list[Mapping[str, Tensor]]()
        on_cpu = update.device.type == "cpu"
        for index, batch in enumerate(micro_batches if on_cpu else one_ahead(micro_batches, update.device)):
            scale, is_last = scales[index], index == len(scales) - 1
            state.micro_batches += 1
            try:
                if scale and (is_last or not deferring) and not update.loss_parallel:
                    losses.append(self.forward_backward(engine, batch, scale, extras, listeners))
                else:
                    with ExitStack() as stack:
                        stack.enter_context(without_sync(() if is_last else deferring))
                        if update.loss_parallel:
                            _enter_loss_parallel(stack)
                        if not scale and index >= len(scales) - padding:  # it is here only as the peers wait for it
                            stack.enter_context(without_trace(update.model))
                            stack.enter_context(update.generators.undrawn())
                        if not scale:
                            stack.enter_context(without_rows(update.parameters.all()))
                        losses.append(self.forward_backward(engine, batch, scale, extras, listeners))
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    f"Out of memory on rank {agreement.rank()} in iteration {state.iteration} with a micro-batch "
                    f"{shapes_of(batch)}: use a smaller batch_size with more accumulation_steps. {one_line(error)}"
                ) from error
            if listeners[2]:
                engine.fire_event(TrainingEvents.BACKWARD_COMPLETED)
        self._broken_off = False
        return self.output(losses, extras, scales)

    def forward_backward(
        self, engine: Engine, batch: Any, scale: float, extras: list[Mapping[str, Tensor]], listeners: Listeners
    ) -> Tensor:
        """Add ``scale`` times the gradients, and the values beside the loss to ``extras``; returns the mean loss.

        The bits are those of ``scaler.scale(loss * scale).backward()``, without the two nodes in its graph.

        Raises:
            ValueError: loss_fn returned what cannot be trained on.
        """
        if listeners[0]:
            engine.fire_event(TrainingEvents.FORWARD_STARTED)
        update = self.update
        try:
            with self._autocast or autocast(update.precision, update.device.type):
                result: Any = update.loss_fn(update.model, batch)
        except Exception as error:
            error.add_note(f"The micro-batch: {shapes_of(batch)}.")
            raise
        if listeners[1]:
            engine.fire_event(TrainingEvents.FORWARD_COMPLETED)
        loss, extra = (result, {}) if type(result) is Tensor and not result.dim() else parts(result)
        if not loss.requires_grad:
            raise ValueError(
                "loss_fn returned a loss that depends on no parameter with requires_grad: compute it from the model's "
                "output, without detach() or torch.no_grad(), and train at least one parameter."
            )
        # made anew: autograd gives it as gradient to a parameter that is the loss
        start = torch.full((), scale, dtype=loss.dtype, device=loss.device)
        if update.scaler is not None:
            start = update.scaler.scale(torch.ones((), device=loss.device)).to(loss.dtype) * scale
        backward(loss, start)
        if extra:
            extras.append({name: scalar(value) for name, value in extra.items()})
        return scalar(loss)

    def output(
        self, losses: list[Tensor], extras: list[Mapping[str, Tensor]], scales: Sequence[float]
    ) -> dict[str, Tensor]:
        """What a group reports: ``loss`` and the values beside it, each the sum of its values times ``scales``."""
        found = {"loss": weighted(losses, scales)}
        if names_of(extras, len(losses)):
            found.update({name: weighted([named[name] for named in extras], scales) for name in extras[0]})
        return found

    def clip_and_step(self) -> tuple[bool, Tensor | None]:
        """Clip, and step in another way than :class:`Update`, which is told ``stepping``.

        Returns:
            Whether it has stepped, and the norm of the gradients before they were clipped, where it is asked for.
        """
        update = self.update
        judges_norm = update.non_finite is not None and update.scaler is None
        if update.clip_norm is None and not update.log_grad_norm and not judges_norm:
            return False, None
        return False, clip_gradients(update.parameters.in_order_of(update.model), update.clip_norm)


def _enter_loss_parallel(stack: ExitStack) -> None:
    from torch.distributed.tensor.parallel import loss_parallel

    context = loss_parallel()
    context.__enter__()
    stack.callback(context.__exit__, None, None, None)  # torch's own does not end on an error


def accumulation_of(accumulate: str | Accumulation | None) -> Accumulation:
    """What ``Update(accumulate=...)`` means.

    Raises:
        ValueError: the name is not known, or its package is not there.
        TypeError: it is neither a name nor an object for it.
    """
    if accumulate is None:
        return Accumulation()
    if isinstance(accumulate, Accumulation):
        if hasattr(accumulate, "update"):
            raise ValueError("accumulate is an object that belongs to another Update: give each one of its own.")
        return accumulate
    known = f"one of {', '.join(ACCUMULATIONS)}, or an Accumulation"
    check_type("accumulate", accumulate, isinstance(accumulate, str), known)
    strategy: Accumulation = by_name("accumulate", accumulate, ACCUMULATIONS)()
    return strategy
