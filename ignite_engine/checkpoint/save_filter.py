"""Which parts, and which names inside parts, a checkpoint is saved without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ignite_engine.checkpoint import part_names
from ignite_engine.checkpoint.patterns import Patterns
from ignite_engine.errors import StateMismatch, shortened

KeepFn = Callable[[str, str, Any], bool]
Capture = Callable[[], Iterable[Mapping[str, Any]]]
"""Gives the parts, in one mapping or several; called where something is left out only."""


class SaveFilter:
    """Leaves things out of a checkpoint by pattern and by function.

    Args:
        exclude: parts, such as ``optimizer``, or names inside parts, such as ``model:backbone.*``.
        keep_fn: ``keep_fn(part, name, value)`` for each name inside a part that ``exclude`` leaves in, on every rank
            with the same result; False leaves it out.

    What is left out stays as it was built when the checkpoint is loaded, so it must not be trained.

    Raises:
        ValueError: a pattern is not one.
    """

    def __init__(self, exclude: Iterable[str] = (), keep_fn: KeepFn | None = None) -> None:
        self._exclude, self._keep = Patterns(exclude, "exclude"), keep_fn

    def __call__(
        self, parts: Mapping[str, Any], kinds: Mapping[str, str] | None = None
    ) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """The parts that are saved, and the names that are left out, by part; none for a whole part.

        Args:
            parts: states by name.
            kinds: what each of them is, see ``part_names``; those that are not known are guessed.
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
            entries = part_names.named(state, kind) or {}
            staying = {name: value for name, value in entries.items() if not self._exclude.has_name(part, name)}
            if self._keep is not None:
                staying = {name: value for name, value in staying.items() if self._keep(part, name, value)}
            if len(staying) < len(entries):
                state = part_names.with_entries(state, staying, kind)
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
        names = {part: part_names.named(state, known.get(part)) or () for part, state in parts.items()}
        try:
            self._exclude.check(names, "this run")
        except ValueError as error:
            raise StateMismatch(str(error)) from error

    def reasons(self, capture: Capture, kinds: Mapping[str, str] | None = None) -> list[str]:
        """What it leaves out of the parts that ``capture`` gives, as the reproducibility report says it."""
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
