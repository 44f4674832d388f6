"""The distribution of the gradients of each parameter, as histograms."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.errors import check_type
from ignite_engine.handlers.media import Histogram
from ignite_engine.ranks import agreement
from ignite_engine.states.model_and_optimizer import named_parameters

EVERY_100 = TrainingEvents.OPTIMIZER_STEP_STARTED(every=100)


class GradientHistograms:
    """Writes a histogram of the gradient of each parameter to ``state.media``, as ``gradients/<parameter>``.

    Gradients are reduced over the ranks and unscaled, and not clipped yet. It reads them from the device, so attach it
    to an event that is rare enough.

    Args:
        include: patterns of names, such as ``head.*``; None: all that have a gradient.
    """

    replayed = True

    def __init__(self, include: list[str] | None = None) -> None:
        is_list = include is None or isinstance(include, list)
        check_type("include", include, is_list, "a list of patterns of names, or None")
        self.include = include

    def attach(self, trainer: Trainer, event: Any = EVERY_100) -> None:
        """Write at ``event``, which counts updates: one of ``OPTIMIZER_STEP_STARTED``, when gradients are whole."""
        model = getattr(trainer.update, "model", None)
        check_type("the update's model", model, isinstance(model, nn.Module), "a module")
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        model: Any = trainer.update.model  # type: ignore[attr-defined]  # attach() has seen it
        for name, parameter in named_parameters(model):
            gradient = parameter.grad
            if gradient is None or not self._is_chosen(name):
                continue
            if hasattr(gradient, "full_tensor"):  # a collective
                gradient = gradient.full_tensor()
            if agreement.rank() == 0:
                histogram = Histogram(gradient.coalesce().values() if gradient.is_sparse else gradient)
                histogram.content()  # counted now: the gradient does not last until it is logged
                trainer.state.media[f"gradients/{name}"] = histogram

    def _is_chosen(self, name: str) -> bool:
        return self.include is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.include)
