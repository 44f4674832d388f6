"""Forward and backward of one micro-batch, and the means over a group of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_engine.errors import shapes_of
from ignite_engine.events import TrainingEvents
from ignite_engine.step.backward import backward
from ignite_engine.step.losses import LossFn, parts, scalar, unusable_result, weighted, weighted_by_name
from ignite_engine.step.precision import LossScaler

Accumulate = Callable[[Engine, Sequence[Any], list[float]], dict[str, Tensor]]
Listeners = tuple[list[Any], list[Any], list[Any]]
"""Ignite's lists of the handlers before a forward, after it, and after its backward."""


class ForwardBackward:
    """Forward and backward of one micro-batch that is on the device.

    Args:
        context: of each forward, such as autocast; None: no context.
        scaler: of the loss, or None.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, context: AbstractContextManager[Any] | None, scaler: LossScaler | None
    ) -> None:
        self.model, self.loss_fn, self._context, self._scaler = model, loss_fn, context, scaler
        self._factors: dict[float, Tensor] = {}

    def __call__(
        self, engine: Engine, batch: Any, scale: float, extras: list[Mapping[str, Tensor]], listeners: Listeners
    ) -> Tensor:
        """Add ``scale`` times the gradients, and the values beside the loss to ``extras``; returns the mean loss.

        The bits are those of ``scaler.scale(loss * scale).backward()``, without the two nodes in its graph.

        Raises:
            ValueError: loss_fn returned what cannot be trained on.
        """
        if listeners[0]:
            engine.fire_event(TrainingEvents.FORWARD_STARTED)
        try:
            if self._context is None:
                result: Any = self.loss_fn(self.model, batch)
            else:
                with self._context:
                    result = self.loss_fn(self.model, batch)
        except Exception as error:
            error.add_note(f"The micro-batch: {shapes_of(batch)}.")
            raise
        if listeners[1]:
            engine.fire_event(TrainingEvents.FORWARD_COMPLETED)
        try:
            loss, extra = (result, None) if type(result) is Tensor else parts(result)
            if loss.dim():
                loss = loss.reshape(())
            factor = self._factors.get(scale)
            if factor is None or factor.dtype != loss.dtype or factor.device != loss.device:
                factor = self._factor(scale, loss)
            backward(loss, factor)
            if extra is not None:
                extras.append({name: scalar(value) for name, value in extra.items()})
            return scalar(loss)
        except Exception as error:
            if (unusable := unusable_result(result)) is not None:
                raise ValueError(unusable) from error
            raise

    def _factor(self, scale: float, loss: Tensor) -> Tensor:
        """The gradient that backward starts from."""
        if self._scaler is not None:
            return self._scaler.scale(torch.ones((), device=loss.device)).to(loss.dtype) * scale
        if len(self._factors) > 64:
            self._factors.clear()
        factor = self._factors[scale] = torch.full((), scale, dtype=loss.dtype, device=loss.device)
        return factor


def listeners_of(engine: Engine) -> Listeners:
    """Looked up once for a group: a handler that comes or goes in the middle of it changes the same lists."""
    handlers = engine._event_handlers
    return (
        handlers[TrainingEvents.FORWARD_STARTED],
        handlers[TrainingEvents.FORWARD_COMPLETED],
        handlers[TrainingEvents.BACKWARD_COMPLETED],
    )


def means(losses: list[Tensor], extras: list[Mapping[str, Tensor]], scales: list[float]) -> dict[str, Tensor]:
    """What a group reports: ``loss`` and the values beside it, each the sum of its values times ``scales``."""
    output = {"loss": weighted(losses, scales)}
    if extras:
        output.update(weighted_by_name(extras, scales))
    return output
