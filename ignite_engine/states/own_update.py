"""Optimizers and loss scalers of a custom update function that are in no checkpoint, as they are not registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from ignite_engine.rng import attributes_of
from ignite_engine.states.generators import unsaved_generators
from ignite_engine.states.model_and_optimizer import OptimizerState
from ignite_engine.states.registry import Registry


def unsaved_of(update: Callable[..., Any], registry: Registry) -> list[str]:
    """One reason per unregistered optimizer, loss scaler or generator that ``update`` uses.

    Looked at are the attributes of an object, and what a function closes over or uses of its module.
    """
    objects = registry.objects.values()
    generators = list(unsaved_generators(registry.objects, getattr(update, "loss_fn", None)))
    saved = [registered.optimizer if isinstance(registered, OptimizerState) else registered for registered in objects]
    return [
        f"{name} ({type(obj).__name__}) of the update is not saved (trainer.register({name!r}, {name}, shared=True))"
        for name, obj in _used_by(update)
        if not any(obj is registered for registered in saved)
    ] + generators


def _used_by(update: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    for name, value in attributes_of(update):
        for key, element in value.items() if isinstance(value, Mapping) else (("", value),):
            if isinstance(element, Optimizer) or (isinstance(element, GradScaler) and element.is_enabled()):
                yield f"{name}[{key!r}]" if key else name, element
