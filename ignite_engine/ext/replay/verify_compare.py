"""Does a resumed run equal the uninterrupted one? The first piece of state that differs, from records of three runs.

The reference, one that was killed, and one that resumed what the killed one had saved: each wrote its records with a
:class:`~ignite_engine.ext.replay.verify_recorder.StateRecorder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ignite_engine.ext.replay.verify_recorder import OUTPUT, BoundaryRecord
from ignite_engine.text import in_columns

# if these differ before anything was killed, the run is not a function of its seed
_ESSENTIAL = ("model", "optimizer", "scaler", "rng", "data", "trainer", OUTPUT)


@dataclass(frozen=True)
class Difference:
    """One piece of state that differs from the reference."""

    iteration: int
    component: str
    piece: str
    expected: str
    found: str


@dataclass(frozen=True)
class Comparison:
    """The result.

    Attributes:
        line: the verdict, in one sentence.
        exact: nothing that is saved differs.
        differences: those at the first step boundary with any; empty if exact.
        notes: what was left out of the comparison.
    """

    line: str
    exact: bool
    differences: Sequence[Difference] = ()
    notes: Sequence[str] = ()


def compare(
    reference: Sequence[BoundaryRecord], killed: Sequence[BoundaryRecord], resumed: Sequence[BoundaryRecord]
) -> Comparison:
    """Whether the resumed run is the reference from where it was resumed to its end.

    Pieces that differ between reference and killed run before the kill are not functions of the seed (a clock's, for
    example): they are left out, unless they are weights, optimizer, generators, data, counters or losses.
    """
    expected = {record.boundary: record for record in reference}
    noise, unstable = _noise(expected, killed)
    if unstable:
        return Comparison(
            f"The run is not deterministic: two runs from the same start differ at iteration {unstable[0].iteration}, "
            f"first in {_full_name(unstable[0])}, before anything was killed: set "
            "run.deterministic=true if it trains on a device, and call seed_everything() before the data and the model "
            "are made.",
            exact=False,
            differences=unstable,
        )
    clocks = ", ".join(sorted(noise))
    notes = [f"not compared, as it differs between two runs from the same start: {clocks}"] if clocks else []
    start = next((record for record in resumed if record.resumed), None)
    if start is None:
        return Comparison(
            "Nothing was resumed: the run that should have resumed started over.", exact=False, notes=notes
        )
    compared = 0
    for record in resumed:
        counterpart = expected.get(record.boundary)
        if counterpart is None:
            line = f"The resumed run reached iteration {record.iteration}, epoch {record.epoch}, the other did not."
            return Comparison(line, exact=False, notes=notes)
        compared += sum(map(len, record.components.values()))
        different = [difference for difference in _differences(counterpart, record) if _label(difference) not in noise]
        if different:
            line = (
                f"Resume is NOT exact: at iteration {record.iteration} {_full_name(different[0])} differs first. "
                "What the run depends on and does not save, trainer.register(name, object) saves."
            )
            return Comparison(line, exact=False, differences=different, notes=notes)
    last, end = resumed[-1].iteration, reference[-1].iteration
    if last != end:
        line = f"The resumed run ended at iteration {last}, the uninterrupted one at {end}."
        return Comparison(line, exact=False, notes=notes)
    line = (
        f"Resume is exact: killed at iteration {killed[-1].iteration + 1}, resumed from {start.iteration}, "
        f"{compared} digests over iterations {start.iteration} to {last} are equal."
    )
    return Comparison(line, exact=True, notes=notes)


def _noise(
    expected: Mapping[tuple[int, int], BoundaryRecord], killed: Sequence[BoundaryRecord]
) -> tuple[set[str], list[Difference]]:
    """Labels of what is not a function of the seed, and the essential differences at the first boundary with any."""
    noise: set[str] = set()
    for record in killed:
        if (counterpart := expected.get(record.boundary)) is None:
            continue
        found = _differences(counterpart, record)
        essential = [difference for difference in found if difference.component.split("/")[0] in _ESSENTIAL]
        if essential:
            return noise, essential
        noise |= {_label(difference) for difference in found}
    return noise, []


def _differences(expected: BoundaryRecord, found: BoundaryRecord) -> list[Difference]:
    """Pieces that differ, the essential ones first. A part that only one side has differs as a whole."""
    rows: list[Difference] = []
    names = sorted(expected.components.keys() | found.components.keys(), key=_order)
    for name in names:
        if found.resumed and name not in found.components:
            continue
        ours, theirs = expected.components.get(name, {}), found.components.get(name, {})
        for piece in dict.fromkeys((*ours, *theirs)):
            pair = ours.get(piece, "missing"), theirs.get(piece, "missing")
            if pair[0] != pair[1]:
                rows.append(Difference(found.iteration, name, piece, *pair))
    return rows


def _order(component: str) -> tuple[int, str]:
    kind = component.split("/")[0]
    return (_ESSENTIAL.index(kind) if kind in _ESSENTIAL else len(_ESSENTIAL)), component


def _label(difference: Difference) -> str:
    return f"{difference.component} {difference.piece}"


def _full_name(difference: Difference) -> str:
    return f"{difference.piece} of {difference.component}" if difference.piece else difference.component


def table(differences: Sequence[Difference], rows: int = 10) -> list[str]:
    """The first few differences as lines of a table."""
    head = ("iteration", "component", "piece", "uninterrupted", "resumed")
    first = [
        (
            str(difference.iteration),
            difference.component,
            difference.piece,
            _short(difference.expected),
            _short(difference.found),
        )
        for difference in differences[:rows]
    ]
    more = len(differences) - rows
    return in_columns([head, *first]) + ([f"... and {more} more"] if more > 0 else [])


def _short(value: str) -> str:
    return value.removeprefix("sha256:")[:12] if value.startswith("sha256:") else value
