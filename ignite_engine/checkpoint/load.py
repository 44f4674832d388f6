"""Decides what each registered object loads from a source, before anything is loaded.

A source that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ignite_engine.checkpoint import part_names
from ignite_engine.checkpoint.part_names import Patterns
from ignite_engine.checkpoint.sources import LoadSource, Source
from ignite_engine.errors import StateMismatch, shortened


class _Stateful(Protocol):
    def state_dict(self) -> Any: ...


@dataclass
class LoadReport:
    """What was loaded and what did not fit. A name inside a part is written ``part:name``."""

    source: str
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Requested, but not in the source: stays as it was built."""
    unexpected: list[str] = field(default_factory=list)
    """Requested and in the source, but not in this run, or of another shape here."""

    @property
    def complete(self) -> bool:
        """Whether everything fitted."""
        return not (self.missing or self.unexpected)

    @property
    def differences(self) -> str:
        """A description of what did not fit; empty if everything did."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected}
        return "; ".join(f"{len(names)} {kind}: {shortened(names)}" for kind, names in kinds.items() if names)

    def names(self, part: str) -> set[str]:
        """The names that were loaded inside a part."""
        return {name.removeprefix(f"{part}:") for name in self.loaded if name.startswith(f"{part}:")}

    def __str__(self) -> str:
        loaded = f"{len(self.loaded)} loaded: {shortened(self.loaded)}" if self.loaded else "nothing loaded"
        return "; ".join([f"From {self.source} {loaded}", *([self.differences] if self.differences else [])])


def prepare(
    source: LoadSource,
    read: Source,
    here: Mapping[str, _Stateful],
    *,
    before: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """Decide what each object is to load; changes nothing.

    Args:
        source: what is requested.
        read: the contents of the source.
        here: the registered objects by part. An object with ``belongs_to_its_run`` is loaded only if ``parts`` has its
            exact name.
        before: states that earlier sources bring, by part.
        kinds: the kind of each part that the source does not give.

    Returns:
        The states to load, by part, the model's first, whole and under this run's names (also of parts that nothing
        is registered for, if the source is strict); and what became of the names.

    Raises:
        ValueError: a pattern or an average matches nothing, or two names become one.
    """
    known = {**(kinds or {}), **read.kinds}
    parts = _weighted(source, read, known)

    try:
        saved = {part: part_names.renamed(state, source.renamed, known.get(part)) for part, state in parts.items()}
    except ValueError as error:
        raise ValueError(f"{error} of {read.path}.") from None

    def kind_or_name(part: str) -> str:
        return known.get(part, part)

    wanted, ignored = Patterns(source.parts, "parts", kind_or_name), Patterns(source.ignore, "ignore", kind_or_name)
    own = dict(before or {})

    def own_entries(part: str) -> dict[str, Any]:
        if part not in own:
            own[part] = here[part].state_dict()  # only for parts that are loaded: state_dict() makes an average start
        return part_names.named(own[part], known.get(part)) or {}

    def is_wanted(part: str) -> bool:
        if getattr(here.get(part), "belongs_to_its_run", False):
            return part in source.parts
        return wanted.concern(part) and not ignored.has_part(part)

    order = sorted({*saved, *here}, key=lambda part: (part != "model", part))
    entries_of = {part: part_names.named(saved.get(part), known.get(part)) for part in order}
    # the form of a part cannot be seen where all its names were left out
    entries_of |= {part: {} for part in saved if entries_of[part] is None and read.left_out.get(part)}
    inside = {
        part: [*(entries or ()), *(own_entries(part) if entries and part in here and is_wanted(part) else ())]
        for part, entries in entries_of.items()
    }
    wanted.check(inside, str(read.path))
    ignored.check(inside, f"{read.path} or this run")
    report, states = LoadReport(str(read.path)), dict[str, Any]()
    for part in filter(is_wanted, order):
        if part not in saved:
            report.missing += [part] if wanted.has_part(part) else []
            continue
        if part not in here:
            if source.strict:
                states[part] = saved[part]
            continue
        if (entries := entries_of[part]) is None:
            states[part] = saved[part]
            report.loaded.append(part)
            continue
        mine, taken = own_entries(part), list[str]()
        is_optimizer = part_names.form_of(saved[part], known.get(part)) == "optimizer"
        shaped = (entries, mine)
        if is_optimizer:  # a parameter's state has the shape of the parameter
            shaped = (entries_of.get("model") or {}, own_entries("model") if "model" in here else {})
        everything = dict.fromkeys((*entries, *mine))
        for name in everything:
            if not wanted.has_name(part, name) or ignored.has_name(part, name):
                continue
            if name not in entries:
                report.missing.append(f"{part}:{name}")
            elif name not in mine:
                report.unexpected.append(f"{part}:{name}")
            elif differing := _shapes(shaped[0].get(name), shaped[1].get(name)):
                report.unexpected.append(f"{part}:{name} ({differing})")
            else:
                taken.append(name)
        report.loaded += [f"{part}:{name}" for name in taken]
        continues = is_wanted("trainer") and "trainer" in saved
        if len(taken) == len(everything) and (continues or not is_optimizer):
            states[part] = saved[part]
        else:
            base = own[part] if is_optimizer else saved[part]
            brought = {name: entries[name] for name in taken if entries[name] is not None}
            states[part] = part_names.with_entries(base, {**mine, **brought}, known.get(part))
    return states, report


def joined(sources: Sequence[tuple[LoadSource, LoadReport]]) -> LoadReport:
    """One report for several sources.

    Raises:
        StateMismatch: one line; a strict source lacks what no other source has, or has what does not fit.
    """
    loaded = list(dict.fromkeys(name for _, report in sources for name in report.loaded))
    for source, report in sources:
        own = LoadReport(report.source, [], [n for n in report.missing if n not in set(loaded)], report.unexpected)
        if source.strict and not own.complete:
            raise StateMismatch(
                f"{report.source} and this run differ ({own.differences}): rename or ignore these names, or give "
                "strict=False to leave them as they were built."
            )
    missing, unexpected = (
        list(dict.fromkeys(name for _, report in sources for name in getattr(report, kind) if name not in set(loaded)))
        for kind in ("missing", "unexpected")
    )
    return LoadReport("; ".join(report.source for _, report in sources), loaded, missing, unexpected)


def _weighted(source: LoadSource, read: Source, kinds: Mapping[str, str]) -> dict[str, Any]:
    if source.weights == "raw":
        return dict(read.parts)
    averages = part_names.averages(read.parts, kinds.get)
    if source.weights not in averages:
        raise ValueError(
            f"weights={source.weights!r}, but {read.path} holds no average of that name; "
            f"expected raw{''.join(f' or {average}' for average in averages)}."
        )
    return {**read.parts, "model": {**read.parts.get("model", {}), **averages[source.weights]}}


def _shapes(saved: Any, here: Any) -> str:
    """Both shapes in words, if they differ."""
    if not (isinstance(saved, Tensor) and isinstance(here, Tensor)) or saved.shape == here.shape:
        return ""
    return f"saved {tuple(saved.shape)}, here {tuple(here.shape)}"
