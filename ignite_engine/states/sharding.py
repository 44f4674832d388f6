"""States for models and optimizers that are sharded over ranks, out of whatever was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ignite_engine.checkpointing.shards import (
    Sharded,
    fitted,
    fitted_tensor,
    has_sharded,
    is_sharded,
    layout_of,
    replicated,
)
from ignite_engine.states.model_and_optimizer import ModelState, OptimizerState, reshard, unwrap


def layout_of_models(objects: Iterable[Any]) -> list[str]:
    """How the models among registered objects are sharded, as text; empty: they are not."""
    models = [unwrap(obj.model) for obj in objects if isinstance(obj, ModelState)]
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
    if not isinstance(obj, OptimizerState):
        return fitted(state, obj.state_dict() if shared or has_sharded(state) else None)
    parameters = obj.parameters()
    if not has_sharded((state["state"], list(parameters.values()))):
        return state
    return {
        **state,
        "state": {name: _laid_out(values, parameters.get(name)) for name, values in state["state"].items()},
    }


def _laid_out(values: Mapping[str, Any], parameter: Tensor | None) -> dict[str, Any]:
    """A copy of a parameter's state, sharded as the parameter is; a step count is whole, as in torch's optimizers."""
    fit = {name: fitted_tensor(value, None if name == "step" else parameter) for name, value in values.items()}
    for name, value in values.items():  # of another shape than the parameter
        if isinstance(value, Sharded) and is_sharded(parameter) and not is_sharded(fit[name]):
            fit[name] = replicated(fit[name], parameter)
    return fit
