"""States of models and optimizers under names that do not depend on wrapping or order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine.errors import StateMismatch, leave_out


def clean_name(name: str) -> str:
    """A parameter's name without the prefix of torch.compile; :func:`unwrap` removes DDP's."""
    return name.replace("_orig_mod.", "")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own model inside DDP and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "no_sync"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class ModelState:
    """A model's state under names that do not depend on its wrapping."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.swapped_out: Mapping[str, Tensor] = {}
        """The model's own values by name, while an evaluation runs with others in their place."""

    def state_dict(self) -> dict[str, Any]:
        state = {clean_name(name): value for name, value in unwrap(self.model).state_dict().items()}
        return {name: self.swapped_out.get(name, value) for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load by name.

        Raises:
            StateMismatch: names or shapes differ from those saved.
        """
        model = unwrap(self.model)
        own = {clean_name(name): name for name in model.state_dict()}
        try:
            model.load_state_dict({own.get(name, name): value for name, value in state.items()})
        except RuntimeError as error:  # torch's has a line for each parameter
            differences = _differences(self.state_dict(), state)
            if not differences:
                raise
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise StateMismatch(
                f"The model is not the saved one ({'; '.join(differences[:3])}{more}): build it as it was saved, or "
                "start a run in a new folder."
            ) from error


def _differences(here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """In which names and shapes two states of a model differ."""
    shapes = [{name: tuple(getattr(value, "shape", ())) for name, value in state.items()} for state in (here, saved)]
    return [
        f"{name} is {shapes[0].get(name, 'missing')}, saved {shapes[1].get(name, 'without it')}"
        for name in {**shapes[0], **shapes[1]}
        if shapes[0].get(name) != shapes[1].get(name)
    ]


class OptimizerState:
    """An optimizer's state keyed by parameter names instead of positions; sparse optimizers too."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer, self.model = optimizer, model

    def _names(self) -> list[str]:
        """Names in the order of the optimizer's own numbering."""
        known = {id(parameter): clean_name(name) for name, parameter in unwrap(self.model).named_parameters()}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [known.get(id(parameter), f"unnamed.{index}") for index, parameter in enumerate(parameters)]

    def state_dict(self) -> dict[str, Any]:
        state, names = self.optimizer.state_dict(), self._names()
        groups = [group | {"params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
        return {"state": {names[index]: value for index, value in state["state"].items()}, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load by name.

        Raises:
            StateMismatch: the groups differ from those saved, or the optimizer is of another kind.
        """
        index_of = {name: index for index, name in enumerate(self._names())}
        saved = [set(group["params"]) for group in state["param_groups"]]
        names = iter(self._names())
        here = [{next(names) for _ in group["params"]} for group in self.optimizer.param_groups]
        if saved != here:
            different = sorted(set().union(*saved) ^ set().union(*here))[:5]
            raise StateMismatch(
                f"The optimizer's {len(here)} parameter groups are not the {len(saved)} saved ones "
                f"(in one only: {different or 'none, they are grouped otherwise'}): build the same groups, "
                f"or leave the optimizer out with {leave_out('optimizer')}."
            )
        then, now = set(state["param_groups"][0]), set(self.optimizer.param_groups[0])
        if then - now and now - then:  # one side alone may have been added by a schedule, or by another torch
            raise StateMismatch(
                f"The optimizer is a {type(self.optimizer).__name__} and the saved one was of another kind (with "
                f"{', '.join(sorted(then - now))}, now with {', '.join(sorted(now - then))}): build that one, or leave "
                f"it out with {leave_out('optimizer')}."
            )
        ours = iter(index_of[name] for name in self._names())
        groups = []
        for group, own in zip(state["param_groups"], self.optimizer.param_groups, strict=True):
            groups.append({**group, "params": [next(ours) for _ in own["params"]]})
        numbered = {index_of[name]: value for name, value in state["state"].items()}
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})
