"""What became of each part that was to be loaded, for people to read."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ignite_engine.errors import shortened
from ignite_engine.text import in_columns

_OUTCOMES = {
    "missing": "not in the checkpoint, stays as built",
    "not saved": "left out when it was saved, stays as built",
    "waits": "waits until it is registered",
    "unclaimed": "skipped, nothing is registered for it",
}


_MOST_TELLING = ("loaded", "waits", "missing", "not saved", "unclaimed", "skipped", "as built")


@dataclass
class PartRow:
    """What became of one part; one that is taken as a whole has no names."""

    part: str
    outcome: str
    """``loaded``, ``skipped``, ``missing``, ``not saved``, ``waits``, ``unclaimed`` or ``as built``."""
    loaded: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """The plan leaves them out."""
    left_out: list[str] = field(default_factory=list)
    """The checkpoint was saved without them."""
    missing: list[str] = field(default_factory=list)
    """Only here."""
    unexpected: list[str] = field(default_factory=list)
    """Only in the checkpoint."""
    reshaped: list[str] = field(default_factory=list)
    """Names whose shapes differ, with both shapes."""
    origins: dict[str, int] = field(default_factory=dict)
    """The place (from 0) of the source that each loaded name came from, if there are several. A part without names
    is taken as a whole; its source is under ``""``."""

    def origin(self, name: str) -> int:
        """The place of the source that a loaded name came from, or a part that has no names."""
        return self.origins.get(name, self.origins.get("", 0))

    @property
    def has_names(self) -> bool:
        """Whether it is known by names what became of it."""
        return bool(self.loaded or self.skipped or self.left_out or self.differences)

    @property
    def brought(self) -> list[str]:
        """The names that were loaded; ``""`` for a part that has no names and was."""
        whole = self.outcome in ("loaded", "waits") and not self.has_names
        return [""] if whole else self.loaded

    @property
    def differences(self) -> str:
        """In words, what the two sides do not have in common; empty if nothing."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": self.reshaped}
        return "; ".join(f"{len(names)} {kind}: {shortened(names)}" for kind, names in kinds.items() if names)

    def __str__(self) -> str:
        if not self.has_names:
            return _OUTCOMES.get(self.outcome, self.outcome) + "".join(
                f" from {at + 1}" for at in self.origins.values()
            )
        words = [f"loaded {len(self.loaded)}{self._from_where()}"]
        words += [f"skipped {len(self.skipped)}: {shortened(self.skipped)}"] if self.skipped else []
        words += [f"not saved {len(self.left_out)}: {shortened(self.left_out)}"] if self.left_out else []
        return "; ".join([*words, *([self.differences] if self.differences else [])])

    def _from_where(self) -> str:
        names = {
            at: [name for name in self.loaded if self.origins.get(name) == at] for at in set(self.origins.values())
        }
        found = "; ".join(f"from {at + 1}: {shortened(names_of)}" for at, names_of in sorted(names.items()))
        return f" ({found})" if found else ""


@dataclass
class LoadTable:
    """What was loaded, skipped and missing; as text one line per part."""

    source: str
    rows: list[PartRow] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """All sources, if there are several; :attr:`PartRow.origins` are places in this list."""

    @property
    def complete(self) -> bool:
        """Nothing was missing, unexpected or of another shape."""
        return not self.unfit

    @property
    def unfit(self) -> list[PartRow]:
        """The parts in which something was."""
        return [row for row in self.rows if row.differences or row.outcome == "missing"]

    def __getitem__(self, part: str) -> PartRow:
        return next(row for row in self.rows if row.part == part)

    @classmethod
    def joined(cls, tables: Sequence[LoadTable]) -> LoadTable:
        """The joined table of several sources; if several contain a name, the last one wins."""
        if len(tables) == 1:
            return tables[0]
        found: dict[str, list[tuple[int, PartRow]]] = {}
        for at, table in enumerate(tables):
            for row in table.rows:
                found.setdefault(row.part, []).append((at, row))
        rows = [_joined(part, found[part]) for part in sorted(found, key=lambda part: (part != "model", part))]
        sources = [table.source for table in tables]
        return cls("; ".join(sources), rows, sources)

    def lacking(self, elsewhere: Mapping[str, Container[str]]) -> list[PartRow]:
        """The parts in which something did not fit, or was missing that is not ``elsewhere`` (names by part)."""
        found = []
        for row in self.rows:
            brought = elsewhere.get(row.part)
            if brought is not None:
                row = replace(row, missing=[name for name in row.missing if name not in brought])
            if row.differences or (row.outcome == "missing" and brought is None):
                found.append(row)
        return found

    def __str__(self) -> str:
        rows = in_columns(("", row.part, str(row)) for row in self.rows)
        if not self.sources:
            return "\n".join([f"Loaded from {self.source}:", *rows])
        sources = [f"  {place}: {source}" for place, source in enumerate(self.sources, 1)]
        return "\n".join(["Loaded from several sources, of which the last that has a name brings it:", *sources, *rows])


def _joined(part: str, rows: Sequence[tuple[int, PartRow]]) -> PartRow:
    """What became of a part, by what each source made of it."""
    origins: dict[str, int] = {}
    for at, row in rows:
        origins |= dict.fromkeys(row.brought, at)
    outcome = min((row.outcome for _, row in rows), key=_MOST_TELLING.index)
    joint = PartRow(part, outcome, [name for name in origins if name], origins=origins)
    known = set(origins)
    for kind in ("missing", "unexpected", "reshaped", "left_out", "skipped"):
        for _, row in rows:
            for text in getattr(row, kind):
                name = text.partition(" (saved ")[0]
                if name not in known:
                    getattr(joint, kind).append(text)
                    known.add(name)
    return joint
