"""Accumulation with the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor

from ignite_engine.events import TrainingEvents
from ignite_engine.ext.rank_invariant.invariant import RankInvariance
from ignite_engine.step.accumulate.forward_backward import ForwardBackward, listeners_of
from ignite_engine.step.device import to_device
from ignite_engine.step.precision import LossScaler


class RankInvariant:
    """Random numbers and sums by ``invariance``; a micro-batch that weighs nothing is left out."""

    def __init__(
        self,
        forward_backward: ForwardBackward,
        invariance: RankInvariance,
        scaler: LossScaler | None,
        device: torch.device,
    ) -> None:
        self._forward_backward, self._invariance = forward_backward, invariance
        self._scaler, self._device = scaler, device

    def __call__(self, engine: Engine, micro_batches: Sequence[Any], scales: list[float]) -> dict[str, Tensor]:
        state: Any = engine.state
        listeners, invariance = listeners_of(engine), self._invariance
        losses, extras = list[Tensor](), list[Mapping[str, Tensor]]()
        with invariance.collecting():
            for index, batch in enumerate(to_device(micro_batches, self._device, state.iteration)):
                if scales[index]:
                    invariance.before(index)
                    losses.append(self._forward_backward(engine, batch, scales[index], extras, listeners))
                state.micro_batches += 1
                if listeners[2]:
                    engine.fire_event(TrainingEvents.BACKWARD_COMPLETED)
                invariance.after(index)
        if not losses and self._scaler is not None:  # it makes its scale in its first use, which is that of its peers
            self._scaler.scale(torch.zeros((), device=self._device))
        return invariance.reduce(losses, extras)
