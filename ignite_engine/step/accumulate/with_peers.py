"""Accumulation where peers wait for this rank: it reduces once for a group, and computes what weighs nothing, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor

from ignite_engine.events import TrainingEvents
from ignite_engine.step.accumulate.forward_backward import ForwardBackward, listeners_of, means
from ignite_engine.step.device import to_device
from ignite_engine.step.gradients import check_tables
from ignite_engine.step.micro_batches import check_accumulates, reducing_modules, share_of, without_sync
from ignite_engine.step.parameters import Parameters
from ignite_engine.step.without_trace import without_rows, without_trace


class WithPeers:
    """For DDP and FSDP2, for a context around forward and backward, and for micro-batches that weigh nothing.

    Args:
        around: makes the context of forward and backward together, such as ``loss_parallel``.
        undrawn: makes a context after which the generators that the model and loss function hold are as before.
        reduce_each_micro_batch: else gradients are reduced in the last backward of a group only.
    """

    def __init__(
        self,
        forward_backward: ForwardBackward,
        parameters: Parameters,
        device: torch.device,
        *,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        undrawn: Callable[[], AbstractContextManager[Any]] = nullcontext,
        reduce_each_micro_batch: bool = False,
    ) -> None:
        self._forward_backward, self._parameters = forward_backward, parameters
        self._device, self._around, self._undrawn = device, around, undrawn
        reducing = reducing_modules(forward_backward.model)
        self._is_fsdp = any(hasattr(module, "set_requires_gradient_sync") for module in reducing)
        if self._is_fsdp:
            check_tables(forward_backward.model)
        self._deferring = () if reduce_each_micro_batch else reducing
        self._broken_off = False

    def __call__(self, engine: Engine, micro_batches: Sequence[Any], scales: list[float]) -> dict[str, Tensor]:
        """As :class:`Plain`.

        Raises:
            ValueError: the model cannot accumulate.
            RuntimeError: an earlier update of an FSDP2 model raised.
        """
        state: Any = engine.state
        deferring = self._deferring if len(scales) > 1 else ()
        for module in deferring:
            check_accumulates(module)
        if self._broken_off:
            raise RuntimeError(
                "An update of this FSDP2 model raised, and FSDP2 keeps the gradients that it had by then: make the "
                "model, its optimizer and Update again before you train on."
            )
        self._broken_off = self._is_fsdp
        listeners, last = listeners_of(engine), len(scales) - 1
        first_repeated = len(scales) - share_of(engine, state.batch).padding
        losses, extras = list[Tensor](), list[Mapping[str, Tensor]]()
        for index, batch in enumerate(to_device(micro_batches, self._device, state.iteration)):
            scale = scales[index]
            repeated = not scale and index >= first_repeated
            with (
                without_sync(() if index == last else deferring),
                self._around(),
                without_trace(self._forward_backward.model) if repeated else nullcontext(),
                self._undrawn() if repeated else nullcontext(),
                nullcontext() if scale else without_rows(self._parameters.all()),
            ):
                losses.append(self._forward_backward(engine, batch, scale, extras, listeners))
            state.micro_batches += 1
            if listeners[2]:
                engine.fire_event(TrainingEvents.BACKWARD_COMPLETED)
        self._broken_off = False
        return means(losses, extras, scales)
