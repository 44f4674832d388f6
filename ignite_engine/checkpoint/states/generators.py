"""Random number generators held by the modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ignite_engine import rng
from ignite_engine.checkpoint.states.model_and_optimizer import unwrap
from ignite_engine.errors import StateMismatch, leave_out


class ModelGenerators:
    """The states of every ``torch.Generator`` that is an attribute of a module in a model, by name.

    Args:
        model: returns the model.
    """

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        self._model = model

    def found(self) -> dict[str, torch.Generator]:
        """The generators by name, such as ``dropout.noise``; each once."""
        found: dict[int, tuple[str, torch.Generator]] = {}
        for path, module in unwrap(self._model()).named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Generator) and rng.is_generator(value):
                    found.setdefault(id(value), (f"{path}.{name}".removeprefix("."), value))
        return dict(found.values())

    def state_dict(self) -> dict[str, Tensor]:
        return {name: generator.get_state() for name, generator in self.found().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state of each generator.

        Raises:
            StateMismatch: the model has generators of other names.
        """
        found = self.found()
        if found.keys() != state.keys():
            raise StateMismatch(
                f"The model has the generators {sorted(found)}, and those of {sorted(state)} were saved: give it the "
                f"same ones, or leave theirs out with {leave_out('generators')}."
            )
        for name, generator in found.items():
            generator.set_state(state[name])

    @contextmanager
    def undrawn(self) -> Iterator[None]:
        """Restore these generators and the global ones after the body, which may draw from them."""
        before = [(generator, generator.get_state()) for generator in self.found().values()]
        try:
            with rng.isolated():
                yield
        finally:
            for generator, state in before:
                generator.set_state(state)


@contextmanager
def undrawn(objects: Mapping[str, Any]) -> Iterator[None]:
    """Restore the global generators and those among ``objects`` after the body, which may draw from them."""
    with rng.isolated(), ExitStack() as stack:
        for part in objects.values():
            if isinstance(part, ModelGenerators):
                stack.enter_context(part.undrawn())
        yield
