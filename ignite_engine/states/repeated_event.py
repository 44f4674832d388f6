"""EPOCH_STARTED comes a second time where a run resumes within an epoch: what its handlers do to states is undone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_engine.checkpointing.nested import rebuilt, walk
from ignite_engine.ranks import agreement

if TYPE_CHECKING:
    from ignite_engine.states.registry import Registry

_NOT_KEPT = frozenset({"counters", "data", "rng", "model", "parameters", "average", "optimizer"})
"""Kinds that the run itself puts in place, and those of the size of a model."""


@contextmanager
def undone(registry: Registry) -> Iterator[None]:
    """Give registered objects the states back that they had before, where a handler has changed them; a collective.

    The states were saved after this event had come, so an object that begins anew in each epoch and one that counts
    epochs both go on as in the uninterrupted run. Of optimizers the groups' settings are kept, such as a rate that a
    schedule sets; not weights, averages and the optimizers' own states.
    """
    kept = {name: obj for name, obj in registry.objects.items() if registry.kinds[name] not in _NOT_KEPT}
    states = {name: _deep_copy(obj.state_dict()) for name, obj in kept.items()}
    optimizers = [getattr(obj, "optimizer", obj) for obj in registry.objects.values()]
    settings = [
        (group, _group_settings(group))
        for optimizer in optimizers
        if isinstance(optimizer, Optimizer)
        for group in optimizer.param_groups
    ]
    yield
    own = [name for name, state in states.items() if not _are_same_states(kept[name].state_dict(), state)]
    changed = {name for names in agreement.gather_objects(own) for name in names}  # loading may be a collective
    for name in [name for name in kept if name in changed]:
        kept[name].load_state_dict(states[name])
    for group, before in settings:
        for key, value in before.items():
            if not isinstance(value, Tensor):
                group[key] = value
            elif isinstance(group[key], Tensor):
                group[key].copy_(value)


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deep_copy(value) for key, value in group.items() if key != "params"}


def _deep_copy(state: Any) -> Any:
    return rebuilt(state, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else deepcopy(leaf))


def _are_same_states(first: Any, second: Any) -> bool:
    before, after = walk(first), walk(second)
    return len(before) == len(after) and all(
        path == other_path and _same_leaf(value, other)
        for (path, value), (other_path, other) in zip(before, after, strict=True)
    )


def _same_leaf(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        alike = (first.shape, first.dtype, first.layout) == (second.shape, second.dtype, second.layout)
        return alike and torch.equal(first, second)
    try:
        return bool(first == second)
    except Exception:  # such as an array: loaded again
        return False
