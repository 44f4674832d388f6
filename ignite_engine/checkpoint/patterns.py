"""Patterns for parts of a checkpoint and for names inside them: ``optimizer``, ``model:backbone.*``, ``*:head.*``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from ignite_engine.errors import did_you_mean


class Patterns:
    """``part`` is a whole part, ``part:name`` for names inside parts; ``*``, ``?`` and ``[...]`` as in a shell.

    Args:
        texts: the patterns.
        setting: what they are called where they were given, for errors.
        category: the group that a part belongs to, which can be given instead of the part's name.

    Raises:
        ValueError: one of them is not text, or is empty on a side of the colon.
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
        """Whether the whole part is meant."""
        return any(name is None and self._is_part(pattern, part) for pattern, name in self._pairs)

    def has_name(self, part: str, name: str) -> bool:
        """Whether this name inside the part is meant, by itself or with the whole part."""
        return any(
            self._is_part(pattern, part) and (inside is None or fnmatchcase(name, inside))
            for pattern, inside in self._pairs
        )

    def concern(self, part: str) -> bool:
        """Whether any of them is about this part or names inside it."""
        return any(self._is_part(pattern, part) for pattern, _ in self._pairs)

    def check(self, contents: Mapping[str, Iterable[str]], where: str) -> None:
        """Refuse a pattern that matches nothing.

        Args:
            contents: the names inside each part, by part.
            where: what was searched, for the error.

        Raises:
            ValueError: names the first such pattern, and what is there.
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
