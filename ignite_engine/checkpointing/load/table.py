"""What became of each part that was to be loaded, for people to read."""

from __future__ import annotations

from dataclasses import dataclass, field

from ignite_engine.errors import shortened
from ignite_engine.text import in_columns

_OUTCOMES = {
    "missing": "not in the checkpoint, stays as built",
    "not saved": "left out when it was saved, stays as built",
    "waits": "waits until it is registered",
    "unclaimed": "skipped, nothing is registered for it",
}


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
    """Of another shape, with both shapes."""

    @property
    def differences(self) -> str:
        """In words, what the two sides do not have in common; empty if nothing."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": self.reshaped}
        return "; ".join(f"{len(names)} {kind}: {shortened(names)}" for kind, names in kinds.items() if names)

    def __str__(self) -> str:
        if not (self.loaded or self.skipped or self.left_out or self.differences):
            return _OUTCOMES.get(self.outcome, self.outcome)
        words = [f"loaded {len(self.loaded)}"]
        words += [f"skipped {len(self.skipped)}: {shortened(self.skipped)}"] if self.skipped else []
        words += [f"not saved {len(self.left_out)}: {shortened(self.left_out)}"] if self.left_out else []
        return "; ".join([*words, *([self.differences] if self.differences else [])])


@dataclass
class LoadTable:
    """What was loaded, skipped and missing; as text one line per part."""

    source: str
    rows: list[PartRow] = field(default_factory=list)

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

    def __str__(self) -> str:
        return "\n".join([f"Loaded from {self.source}:", *in_columns(("", row.part, str(row)) for row in self.rows)])
