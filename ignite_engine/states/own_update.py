"""What an update function of the user's own trains, of which a checkpoint knows what was registered only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from ignite_engine.states.model_and_optimizer import OptimizerState
from ignite_engine.states.registry import Registry


def unsaved_of(update: Callable[..., Any], registry: Registry) -> list[str]:
    """Reasons, one for each optimizer and loss scaler that ``update`` uses and nobody has registered.

    Looked at are the attributes of an object, and what a function closes over or uses of its module.
    """
    objects = registry.objects.values()
    saved = [each.optimizer if isinstance(each, OptimizerState) else each for each in objects]
    return [
        f"{name} ({type(obj).__name__}) of the update is not saved (trainer.register({name!r}, {name}, shared=True))"
        for name, obj in _used_by(update)
        if not any(obj is each for each in saved)
    ]


def _used_by(update: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    owner = getattr(update, "__self__", update)
    names: dict[str, Any] = {}
    if inspect.isfunction(owner):
        used = inspect.getclosurevars(owner)
        names = {**used.globals, **used.nonlocals}
    elif not inspect.isbuiltin(owner):
        names = dict(getattr(owner, "__dict__", {}))
    for name, value in names.items():
        for key, each in value.items() if isinstance(value, Mapping) else (("", value),):
            if isinstance(each, Optimizer) or (isinstance(each, GradScaler) and each.is_enabled()):
                yield f"{name}[{key!r}]" if key else name, each
