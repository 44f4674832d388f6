"""Names inside a part: a model's tensors, an optimizer's state of each parameter, the weights of an average.

States in one of three forms have names inside; every other part is taken as a whole. The kind of a part is given when
it is registered and kept in the manifest; a missing kind is inferred from the state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor

from ignite_engine.errors import StateMismatch, did_you_mean, shortened


class Patterns:
    """Patterns of parts, such as ``optimizer``, and of names inside parts, ``part:name``; wildcards as in a shell.

    Args:
        texts: the patterns.
        setting: the name of the argument that has the patterns, for errors.
        category: returns the kind of a part, which a pattern can give instead of its name.

    Raises:
        ValueError: a pattern is not a string, or is empty on a side of the colon.
    """

    def __init__(self, texts: Iterable[str], setting: str, category: Callable[[str], str] = lambda part: part) -> None:
        if isinstance(texts, str):
            raise ValueError(f"{setting} is a list of patterns, got {texts!r}: write [{texts!r}].")
        self.texts: Sequence[str] = tuple(texts)
        self._setting, self._category = setting, category
        self._pairs: list[tuple[str, str | None]] = []
        for text in self.texts:
            part, colon, name = text.partition(":") if isinstance(text, str) else ("", "", "")
            if not part or (colon and not name):
                raise ValueError(
                    f"{setting} has the pattern {text!r}: expected a part, such as 'optimizer', or names inside one, "
                    "such as 'model:head.*'."
                )
            self._pairs.append((part, name if colon else None))

    def has_part(self, part: str) -> bool:
        """Whether a pattern means the whole part."""
        return any(name is None and self._is_part(pattern, part) for pattern, name in self._pairs)

    def has_name(self, part: str, name: str) -> bool:
        """Whether a pattern means this name inside the part, or the whole part."""
        return any(
            self._is_part(pattern, part) and (inside is None or fnmatchcase(name, inside))
            for pattern, inside in self._pairs
        )

    def concern(self, part: str) -> bool:
        """Whether a pattern means this part or names inside it."""
        return any(self._is_part(pattern, part) for pattern, _ in self._pairs)

    def check(self, contents: Mapping[str, Iterable[str]], where: str) -> None:
        """Refuse a pattern that matches nothing.

        Args:
            contents: the names inside each part, by part.
            where: the description of what was searched, for the error.

        Raises:
            ValueError: names the first such pattern, and the known names.
        """
        for text, (pattern, name) in zip(self.texts, self._pairs, strict=True):
            parts = [part_name for part_name in contents if self._is_part(pattern, part_name)]
            if not parts:
                raise ValueError(
                    f"{self._setting}: {text!r} is not a part of {where}{did_you_mean(pattern, contents, limit=6)}"
                )
            names = [inside for one in parts for inside in contents[one]]
            if name is not None and not any(fnmatchcase(inside, name) for inside in names):
                near = did_you_mean(name, names, limit=6) if names else ", which has no names inside."
                raise ValueError(f"{self._setting}: {text!r} matches no name in {where}{near}")

    def _is_part(self, pattern: str, part: str) -> bool:
        return fnmatchcase(part, pattern) or self._category(part) == pattern


_Form = Literal["optimizer", "average", "tensors"]


def named(state: Any, kind: str | None = None) -> dict[str, Any] | None:
    """The named entries of a part's state; None: the part is taken as a whole.

    For an optimizer, the state of every parameter; None for a parameter without one.
    """
    form = form_of(state, kind)
    if form == "optimizer":
        return {name: state["state"].get(name) for group in state["param_groups"] for name in group["params"]}
    if form == "average":
        return dict(state["weights"])
    return None if form is None else dict(state)


def with_entries(state: Any, entries: Mapping[str, Any], kind: str | None = None) -> Any:
    """The state with its named entries replaced; the groups of an optimizer stay as they are."""
    form = form_of(state, kind)
    if form == "optimizer":
        return {**state, "state": {name: entry for name, entry in entries.items() if entry is not None}}
    if form == "average":
        return {**state, "weights": dict(entries)}
    return dict(entries)


def renamed(state: Any, rename: Callable[[str], str | None], kind: str | None = None) -> Any:
    """The state with its names changed by ``rename``; names that become None are left out.

    Raises:
        ValueError: two names become the same; the message is the beginning of a sentence.
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
    """``state`` completed by the entries of ``own`` for those of ``names`` that it lacks."""
    entries, mine = named(state, kind) or {}, named(own, kind)
    if mine is None or form_of(own, kind) == "optimizer":  # a parameter without a state of its own starts afresh
        return state
    missing = {name: mine[name] for name in names if name in mine and name not in entries}
    return with_entries(state, {**entries, **missing}, kind) if missing else state


def averages(parts: Mapping[str, Any], kind: Callable[[str], str | None]) -> dict[str, dict[str, Tensor]]:
    """The weights of each average among the parts, by name of the part."""
    known = {part: state for part, state in parts.items() if form_of(state, kind(part)) == "average"}
    return {part: dict(state["weights"]) for part, state in known.items()}


def form_of(state: Any, kind: str | None) -> _Form | None:
    """The form in which a state has names inside; if the kind is unknown, it is inferred from the keys.

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


KeepFn = Callable[[str, str, Any], bool]
Capture = Callable[[], Iterable[Mapping[str, Any]]]
"""Returns the parts, in one mapping or several; called only if something is left out."""


class SaveFilter:
    """Leaves parts, or names inside them, out of a checkpoint.

    Args:
        exclude: parts, such as ``optimizer``, or names inside parts, such as ``model:backbone.*``.
        keep_fn: ``keep_fn(part, name, value)`` for each name inside a part that ``exclude`` leaves in, on every rank
            with the same result; False leaves it out.

    A resumed run has what was left out as it was built, so it must not be trained.

    Raises:
        ValueError: a pattern is malformed.
    """

    def __init__(self, exclude: Iterable[str] = (), keep_fn: KeepFn | None = None) -> None:
        self._exclude, self._keep = Patterns(exclude, "exclude"), keep_fn

    def __call__(
        self, parts: Mapping[str, Any], kinds: Mapping[str, str] | None = None
    ) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """The parts to save, and the names that are left out, by part; no names for a whole part.

        Args:
            parts: states by name.
            kinds: the kind of each part, see :func:`form_of`; unknown ones are inferred.
        """
        if not self._active:
            return dict(parts), {}
        kept: dict[str, Any] = {}
        left_out: dict[str, list[str]] = {}
        for part, state in parts.items():
            kind = (kinds or {}).get(part)
            if self._exclude.has_part(part):
                left_out[part] = []
                continue
            entries = named(state, kind) or {}
            staying = {name: value for name, value in entries.items() if not self._exclude.has_name(part, name)}
            if self._keep is not None:
                staying = {name: value for name, value in staying.items() if self._keep(part, name, value)}
            if len(staying) < len(entries):
                state = with_entries(state, staying, kind)
                left_out[part] = [name for name in entries if name not in staying]
            kept[part] = state
        return kept, left_out

    def check(self, capture: Capture, kinds: Mapping[str, str] | None = None) -> None:
        """Refuse a pattern that matches nothing in the parts that ``capture`` gives.

        Raises:
            StateMismatch: names the pattern.
        """
        if not self._exclude.texts:
            return
        parts, known = {part: state for group in capture() for part, state in group.items()}, kinds or {}
        names = {part: named(state, known.get(part)) or () for part, state in parts.items()}
        try:
            self._exclude.check(names, "this run")
        except ValueError as error:
            raise StateMismatch(str(error)) from error

    def reasons(self, capture: Capture, kinds: Mapping[str, str] | None = None) -> list[str]:
        """What is left out of the parts from ``capture``, as reasons for the reproducibility report."""
        if not self._active:
            return []
        _, left_out = self({part: state for group in capture() for part, state in group.items()}, kinds)
        return [
            f"{part} is saved without {len(names)} names ({shortened(names)})" if names else f"{part} is not saved"
            for part, names in left_out.items()
        ]

    @property
    def _active(self) -> bool:
        return self._keep is not None or bool(self._exclude.texts)
