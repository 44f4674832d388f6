"""The interface of an update to a Trainer and its handlers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from ignite.engine import Engine
from torch import nn
from torch.optim import Optimizer

from ignite_engine.errors import check_type
from ignite_engine.update.losses import LossFn
from ignite_engine.update.micro_batches import WeightFn
from ignite_engine.update.non_finite import NonFinitePolicy
from ignite_engine.update.precision import LossScaler


class BaseUpdate:
    """``update(engine, batch)`` of a :class:`~ignite_engine.Trainer`; a class of your own overrides what it has."""

    model: Any = None
    """A module, if it trains one."""
    loss_fn: LossFn | None = None
    optimizers: Mapping[str, Optimizer] = {}
    """By name; a single one is called ``optimizer``."""
    weight_fn: WeightFn | None = None
    """The weight of a micro-batch, on which the ranks agree; None: each weighs 1."""
    scaler: LossScaler | None = None
    non_finite: NonFinitePolicy | None = None
    device: torch.device | None = None
    """On which it computes; None: it does not say."""
    rank_invariant = False
    """Weights and losses have the same bits on any number of ranks."""
    between_steps = False
    """Gradients are held that no checkpoint has: nothing is saved at this boundary, and no stop takes effect."""
    stepping = True
    """After an error: the weights may be of no iteration, as an optimizer had begun to step."""

    def __call__(self, engine: Engine, batch: Any) -> Any:
        """One iteration; what it returns (a number, a tensor or a mapping) becomes ``state.output``."""
        raise NotImplementedError

    def stateful(self) -> Iterable[tuple[str, Any, bool]]:
        """The objects to save: name, object with a state, and whether every rank has the same."""
        return ()

    def variables(self) -> Mapping[str, Any]:
        """What it uses, by name: an optimizer or loss scaler among it that no checkpoint holds is reported."""
        return vars(self)

    def unsaved(self) -> list[str]:
        """Why a resumed run would not be bit for bit, where that is the update's doing."""
        return ["gradients of iterations without an optimizer step are not saved"] if self.between_steps else []

    def run_started(self) -> None:
        """Called when a run starts, on every rank."""

    def run_ended(self, engine: Engine) -> None:
        """Called when a run has ended without an error, on every rank."""


class FunctionUpdate(BaseUpdate):
    """A plain function as an update."""

    def __init__(self, function: Callable[[Engine, Any], Any]) -> None:
        self.function = function

    def __call__(self, engine: Engine, batch: Any) -> Any:
        return self.function(engine, batch)

    def variables(self) -> Mapping[str, Any]:
        owned = getattr(getattr(self.function, "__self__", self.function), "__dict__", {})
        if not inspect.isfunction(self.function):
            return owned
        named = inspect.getclosurevars(self.function)
        return {**owned, **named.globals, **named.nonlocals}


def update_of(given: Any) -> BaseUpdate:
    """What ``Trainer(update)`` means.

    Raises:
        TypeError: it cannot be an update, or has a state that would not be saved.
    """
    if isinstance(given, BaseUpdate):
        return given
    # what else cannot be called is refused by Ignite
    is_model = isinstance(given, nn.Module)
    check_type("update", given, not is_model, "Update(model, optimizer, loss_fn) or a function")
    is_class_of_its_own = hasattr(type(given), "stateful")
    check_type("update", given, not is_class_of_its_own, "a subclass of BaseUpdate, as it has stateful()")
    return FunctionUpdate(given)
