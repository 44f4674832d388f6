"""Adapts the process function of an existing Ignite engine to a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ignite.engine import Engine
from torch import nn
from torch.optim import Optimizer

from ignite_engine.events import TrainingEvents
from ignite_engine.update.base import FunctionUpdate


class EngineUpdate(FunctionUpdate):
    """The process function of an Ignite engine. Its optimizer steps are those of the optimizers that are known.

    Known are those to which the function or the engine refers by a name of its own: what ``create_supervised_trainer``
    was given, or the attributes of a subclass of ``Engine``; and what :meth:`know` is told.

    Args:
        function: ``function(engine, batch)``.
        engine: which has it.
    """

    def __init__(self, function: Callable[[Engine, Any], Any], engine: Engine) -> None:
        super().__init__(function)
        self.models: dict[str, nn.Module] = {}
        """By name; ``model`` is the only one."""
        self.optimizers: dict[str, Optimizer] = {}
        self._has_stepped = False
        self.know({**self.variables(), **vars(engine)})

    def know(self, named: Mapping[str, Any]) -> None:
        """Models and optimizers by name; other objects, and what is known already, are left out."""
        for name, value in named.items():
            if isinstance(value, nn.Module) and [*value.parameters()]:  # a loss has none
                if not any(value is model for model in self.models.values()):
                    self.models[name] = value
            elif isinstance(value, Optimizer) and not any(value is known for known in self.optimizers.values()):
                self.optimizers[name] = value
                value.register_step_post_hook(self._note_step)
        self.model = next(iter(self.models.values())) if len(self.models) == 1 else None

    def __call__(self, engine: Engine, batch: Any) -> Any:
        self._has_stepped = False
        output = self.function(engine, batch)
        self.between_steps = bool(self.optimizers) and not self._has_stepped
        if self._has_stepped:
            engine.state.optimizer_steps += 1  # type: ignore[attr-defined]  # a TrainingState
            engine.fire_event(TrainingEvents.OPTIMIZER_STEP_COMPLETED)
        return output

    def found(self) -> dict[str, Any]:
        """The objects to save, by name."""
        models = {"model": self.model} if self.model is not None else self.models
        single = len(self.optimizers) == 1
        return {**models, **{"optimizer" if single else name: each for name, each in self.optimizers.items()}}

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._has_stepped = True
