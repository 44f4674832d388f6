"""The usual way: one micro-batch after the other, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor

from ignite_engine.events import TrainingEvents
from ignite_engine.step.accumulate.forward_backward import Accumulate, ForwardBackward, listeners_of, means
from ignite_engine.step.device import to_device


class Plain:
    """For a model that reduces nothing over ranks.

    Args:
        weightless: takes a group of which no micro-batch weighs anything; else each of them does.
    """

    def __init__(self, forward_backward: ForwardBackward, device: torch.device, *, weightless: Accumulate) -> None:
        self._forward_backward, self._device, self._weightless = forward_backward, device, weightless

    def __call__(self, engine: Engine, micro_batches: Sequence[Any], scales: list[float]) -> dict[str, Tensor]:
        if not scales[0]:
            return self._weightless(engine, micro_batches, scales)
        state: Any = engine.state
        listeners, forward_backward = listeners_of(engine), self._forward_backward
        losses, extras = list[Tensor](), list[Mapping[str, Tensor]]()
        on_host = self._device.type == "cpu"
        batches = micro_batches if on_host else to_device(micro_batches, self._device, state.iteration)
        for batch, scale in zip(batches, scales, strict=True):
            losses.append(forward_backward(engine, batch, scale, extras, listeners))
            state.micro_batches += 1
            if listeners[2]:
                engine.fire_event(TrainingEvents.BACKWARD_COMPLETED)
        return means(losses, extras, scales)
