"""What is inside a part, by name: a model's tensors, an optimizer's state of each parameter, the weights of an average.

Three forms of state have names in them; every other part is taken as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

WORDS = ("model", "optimizer", "schedule", "scaler", "data", "counters", "rng", "handlers")
"""The groups of parts that have a word of their own."""


def named(state: Any) -> dict[str, Any] | None:
    """The named entries of a part's state; None: it has none and is taken as a whole.

    Of an optimizer every parameter's state, None for a parameter that has none yet.
    """
    if not isinstance(state, Mapping):
        return None
    if is_optimizer(state):
        return {name: state["state"].get(name) for group in state["param_groups"] for name in group["params"]}
    if is_average(state):
        return dict(state["weights"])
    return dict(state) if _is_tensors(state) else None


def with_entries(state: Any, entries: Mapping[str, Any]) -> Any:
    """The same form of state with other named entries; an optimizer's groups stay as they are."""
    if is_optimizer(state):
        return {**state, "state": {name: entry for name, entry in entries.items() if entry is not None}}
    if is_average(state):
        return {**state, "weights": dict(entries)}
    return dict(entries)


def with_names(state: Any, names: Mapping[str, str]) -> Any:
    """The same state under other names; ``names`` has a new one for each of the old."""
    entries = {names[name]: entry for name, entry in (named(state) or {}).items()}
    if is_optimizer(state):
        groups = [{**group, "params": [names[name] for name in group["params"]]} for group in state["param_groups"]]
        return with_entries({**state, "param_groups": groups}, entries)
    return with_entries(state, entries)


def filled(state: Any, own: Any, names: Collection[str]) -> Any:
    """``state`` with the entries of ``own`` for those of ``names`` that it lacks."""
    entries, mine = named(state), named(own)
    if entries is None:  # nothing was left in it
        entries = {}
    if mine is None or is_optimizer(own):  # a parameter without a state of its own begins afresh
        return state
    missing = {name: mine[name] for name in names if name in mine and name not in entries}
    return with_entries(state, {**entries, **missing}) if missing else state


def word_of(part: str, state: Any = None, obj: Any = None) -> str:
    """Which of ``WORDS`` a part belongs to, by its name, its saved state or its object."""
    if part in ("model", "scaler", "data", "rng"):
        return part
    if part == "trainer":
        return "counters"
    if part.split("/")[0] == "optimizer" or is_optimizer(state):
        return "optimizer"
    keys = set(state) if isinstance(state, Mapping) else set()
    if {"scheduler", "lrs"} <= keys or {"base_lrs", "last_epoch"} <= keys or hasattr(obj, "scheduler"):
        return "schedule"
    return "handlers"


def averages(parts: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The weights of every average among the parts, by the part's name."""
    return {part: dict(state["weights"]) for part, state in parts.items() if is_average(state)}


def is_optimizer(state: Any) -> bool:
    """The state of an optimizer, keyed by the names of its parameters."""
    if not (isinstance(state, Mapping) and set(state) == {"state", "param_groups"}):
        return False
    return all(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def is_average(state: Any) -> bool:
    """The state of an average of the weights, as ``EMA`` has it."""
    if not (isinstance(state, Mapping) and "updates" in state):
        return False
    weights = state.get("weights")
    return weights == {} or _is_tensors(weights)


def _is_tensors(state: Any) -> bool:
    if not isinstance(state, Mapping) or not state:
        return False
    return all(
        isinstance(name, str) and (isinstance(value, Tensor) or name.endswith("_extra_state"))
        for name, value in state.items()
    )
