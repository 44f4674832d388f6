"""What is inside a part, by name: a model's tensors, an optimizer's state of each parameter, the weights of an average.

Three forms of state have names in them; every other part is taken as a whole. What a part is, its ``kind``, is said
when it is registered and kept in the manifest; without one it is guessed from the state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from torch import Tensor

_Form = Literal["optimizer", "average", "tensors"]


def named(state: Any, kind: str | None = None) -> dict[str, Any] | None:
    """The named entries of a part's state; None: it has none and is taken as a whole.

    Of an optimizer every parameter's state, None for a parameter that has none yet.
    """
    form = form_of(state, kind)
    if form == "optimizer":
        return {name: state["state"].get(name) for group in state["param_groups"] for name in group["params"]}
    if form == "average":
        return dict(state["weights"])
    return None if form is None else dict(state)


def with_entries(state: Any, entries: Mapping[str, Any], kind: str | None = None) -> Any:
    """The same form of state with other named entries; an optimizer's groups stay as they are."""
    form = form_of(state, kind)
    if form == "optimizer":
        return {**state, "state": {name: entry for name, entry in entries.items() if entry is not None}}
    if form == "average":
        return {**state, "weights": dict(entries)}
    return dict(entries)


def renamed(state: Any, rename: Callable[[str], str | None], kind: str | None = None) -> Any:
    """The same state under other names, without those that become None.

    Raises:
        ValueError: two names become one; the beginning of a sentence.
    """
    entries = named(state, kind)
    if not entries:
        return state
    names = {name: new for name in entries if (new := rename(name)) is not None}
    if all(names.get(name) == name for name in entries):
        return state
    seen: dict[str, str] = {}
    for name, new in names.items():
        if (other := seen.setdefault(new, name)) != name:
            raise ValueError(f"rename makes {new!r} of both {other!r} and {name!r}")
    if form_of(state, kind) == "optimizer":
        groups = [
            {**group, "params": [names[name] for name in group["params"] if name in names]}
            for group in state["param_groups"]
        ]
        state = {**state, "param_groups": groups}
    return with_entries(state, {new: entries[name] for name, new in names.items()}, kind)


def filled(state: Any, own: Any, names: Collection[str], kind: str | None = None) -> Any:
    """``state`` with the entries of ``own`` for those of ``names`` that it lacks."""
    entries, mine = named(state, kind) or {}, named(own, kind)
    if mine is None or form_of(own, kind) == "optimizer":  # a parameter without a state of its own starts afresh
        return state
    missing = {name: mine[name] for name in names if name in mine and name not in entries}
    return with_entries(state, {**entries, **missing}, kind) if missing else state


def averages(parts: Mapping[str, Any], kind: Callable[[str], str | None]) -> dict[str, dict[str, Tensor]]:
    """The weights of every average among the parts, by the part's name."""
    known = {part: state for part, state in parts.items() if form_of(state, kind(part)) == "average"}
    return {part: dict(state["weights"]) for part, state in known.items()}


def form_of(state: Any, kind: str | None) -> _Form | None:
    """In which form a state has names inside; a kind that is not known is guessed from the keys.

    ``optimizer``: keyed by the names of its parameters. ``average``: as ``EMA`` has it. ``tensors``: a model, or any
    other mapping of names to tensors.
    """
    if not isinstance(state, Mapping):
        return None
    if kind in (None, "optimizer") and {"state", "param_groups"} <= set(state):
        groups = state["param_groups"]
        return "optimizer" if all(isinstance(name, str) for group in groups for name in group["params"]) else None
    if kind in (None, "average") and "updates" in state and "weights" in state:
        return "average" if state["weights"] == {} or _is_tensors(state["weights"]) else None
    return "tensors" if _is_tensors(state) else None


def _is_tensors(state: Any) -> bool:
    if not isinstance(state, Mapping) or not state:
        return False
    return all(
        isinstance(name, str) and (isinstance(value, Tensor) or name.endswith("_extra_state"))
        for name, value in state.items()
    )
