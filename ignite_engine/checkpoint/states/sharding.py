"""States for models and optimizers that are sharded over ranks, out of whatever was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine.checkpoint.shards import (
    Sharded,
    fitted,
    fitted_tensor,
    has_sharded,
    is_sharded,
    layout_of,
    replicated,
)
from ignite_engine.checkpoint.states.model_and_optimizer import ModelState, OptimizerState, reshard, unwrap


def layout_of_models(objects: Iterable[Any]) -> list[str]:
    """How the models among registered objects are sharded, as text; empty: they are not."""
    registered = [obj.model if isinstance(obj, ModelState) else obj for obj in objects]
    models = [unwrap(model) for model in registered if isinstance(model, nn.Module)]
    for model in models:
        reshard(model)
    return list(layout_of(parameter for model in models for parameter in model.parameters()))


def fitted_state(obj: Any, state: Any, *, shared: bool) -> Any:
    """A copy of a saved state with its tensors sharded as the object has them; no more is read than it holds.

    Args:
        obj: the object that will load the state.
        state: tensors, whole or ``Sharded``.
        shared: the object's state is the same on all ranks.

    Raises:
        CheckpointError: a file with a needed piece is damaged.
    """
    parameters = _parameters_by_key(obj, state)
    if parameters is None:
        return fitted(state, obj.state_dict() if shared or has_sharded(state) else None)
    others = {name: value for name, value in state.items() if name != "state"}
    laid_out = {key: _laid_out(values, parameters.get(key)) for key, values in state["state"].items()}
    return {**fitted(others, None), "state": laid_out}


def _parameters_by_key(obj: Any, state: Any) -> Mapping[Any, Tensor] | None:
    """An optimizer's parameters by their keys in a saved state; None: it is no optimizer, or has a form of its own."""
    if isinstance(obj, OptimizerState):
        return obj.parameters()
    if not isinstance(obj, Optimizer) or not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        return None
    saved = [key for group in state["param_groups"] for key in group["params"]]
    own = [parameter for group in obj.param_groups for parameter in group["params"]]
    return dict(zip(saved, own, strict=False))  # the optimizer refuses another number itself


def _laid_out(values: Any, parameter: Tensor | None) -> Any:
    """A copy of a parameter's state, sharded as the parameter is; a step count is whole, as in torch's optimizers."""
    if parameter is None:
        return fitted(values, None)
    fit = {name: fitted_tensor(value, None if name == "step" else parameter) for name, value in values.items()}
    for name, value in values.items():  # of another shape than the parameter
        if isinstance(value, Sharded) and is_sharded(parameter) and not is_sharded(fit[name]):
            fit[name] = replicated(fit[name], parameter)
    return fit
