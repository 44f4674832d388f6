"""Decides what each object of a run loads from a checkpoint, by a plan and before anything is loaded.

A plan that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ignite_engine.checkpointing.load import part_names
from ignite_engine.checkpointing.load.patterns import Patterns
from ignite_engine.checkpointing.load.plan import LoadPlan, renaming
from ignite_engine.checkpointing.load.table import LoadTable, PartRow
from ignite_engine.errors import StateMismatch


class _Stateful(Protocol):
    def state_dict(self) -> Any: ...


class Wanted(NamedTuple):
    """A plan, and the parts that it is to take from."""

    plan: LoadPlan
    source: str
    """Its name, for the table and errors."""
    saved: Mapping[str, Any]
    left_out: Mapping[str, Sequence[str]] = {}
    kinds: Mapping[str, str] = {}


def prepare(
    plan: LoadPlan,
    saved: Mapping[str, Any],
    here: Mapping[str, _Stateful],
    *,
    source: str,
    left_out: Mapping[str, Sequence[str]] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], LoadTable]:
    """Decide what each object is to load; changes nothing.

    Args:
        plan: what is asked for.
        saved: the checkpoint's parts.
        here: the registered objects by part. One that says ``belongs_to_its_run`` is loaded only if the plan gives its
            very name.
        source: the checkpoint's name, for the table and errors.
        left_out: names that were left out when it was saved, by part.
        kinds: what each part is, one of ``part_names.KINDS``; those that are not known are guessed.

    Returns:
        The states to load, by part, the model's first, whole and under this run's names (also of parts that nothing
        is registered for, if the plan is strict); and the table.

    Raises:
        StateMismatch: the plan is strict and something is missing, unexpected or of another shape; one line.
        ValueError: a pattern, a rename or a category of the plan matches nothing, or two names become one.
    """
    return prepare_all([Wanted(plan, source, saved, left_out or {}, kinds or {})], here)


def prepare_all(
    wanted: Sequence[Wanted],
    here: Mapping[str, _Stateful],
    *,
    held: Mapping[str, Container[str] | None] | None = None,
    elsewhere: Mapping[str, Iterable[str]] | None = None,
) -> tuple[dict[str, Any], LoadTable]:
    """As :func:`prepare` from several sources, of which the last that has a name brings it.

    What a strict plan asks for and its source lacks may come from any other.

    Args:
        held: names by part that are skipped, whatever the plans say; None instead of names: the whole part.
        elsewhere: names by part that another source has brought before.
    """
    states: dict[str, Any] = {}
    tables: list[LoadTable] = []
    for source in wanted:
        found, table = _Preparation(source, here, states, held or {}).result()
        states |= found
        tables.append(table)
    joint = LoadTable.joined(tables)
    brought = {part: set(names) for part, names in (elsewhere or {}).items()}
    for row in joint.rows:
        if row.outcome == "loaded":
            brought.setdefault(row.part, set()).update(row.loaded)
    for source, table in zip(wanted, tables, strict=True):
        if source.plan.strict and (unfit := table.lacking(brought)):
            differences = [f"{row.part}: {row.differences or 'missing'}" for row in unfit]
            raise StateMismatch(
                f"{source.source} and this run differ ({'; '.join(differences)}): name them in ignore, rename them, or "
                "say strict=False to leave them as they were built."
            )
    kinds = {part: kind for source in wanted for part, kind in source.kinds.items()}
    model = states.get("model")
    for part, state in states.items():
        if part in here and model and part_names.form_of(state, kinds.get(part)) == "average":
            states[part] = _begun(state, model, joint[part], joint["model"], kinds.get(part))
    return states, joint


def _begun(state: Any, model: Mapping[str, Any], average: PartRow, weights: PartRow, kind: str | None) -> Any:
    """An average that begins with the model's weights wherever those came without it, or later."""
    entries = part_names.named(state, kind) or {}
    later = {
        name: model[name]
        for name in entries
        if name in model and (name not in average.loaded or average.origin(name) < weights.origin(name))
    }
    return part_names.with_entries(state, {**entries, **later}, kind) if later else state


class _Preparation:
    """What one source brings, after those before it.

    Args:
        before: what those bring, by part.
    """

    def __init__(
        self,
        wanted: Wanted,
        here: Mapping[str, _Stateful],
        before: Mapping[str, Any],
        held: Mapping[str, Container[str] | None],
    ) -> None:
        plan, source, saved, left_out, kinds = wanted
        self._plan, self._here, self._source, self._held = plan, here, source, held

        def kind_of(part: str) -> str:
            return kinds.get(part) or part_names.guessed_kind(part, saved.get(part), here.get(part))

        self._kind = kind_of
        self._rename = _Renaming(plan.rename, source, kind_of)
        self._saved = {part: self._rename.state(part, state) for part, state in self._weighted(saved).items()}
        self._left_out = {part: [self._rename(name) for name in names] for part, names in left_out.items()}
        self._rename.check()

        def category(part: str) -> str:
            return part_names.category(part, self._kind(part))

        self._parts = None if plan.parts is None else Patterns(plan.parts, "parts", category)
        self._include = Patterns(plan.include, "include", category)
        self._ignore = Patterns(plan.ignore, "ignore", category)
        self._named: dict[str, dict[str, Any] | None] = {}
        self._own = {part: state for part, state in before.items() if part in here}
        self._own_named: dict[str, dict[str, Any]] = {}
        known = {*self._saved, *here, *self._left_out}
        if self._parts is not None:
            self._parts.check({part: () for part in known}, self._source)
        names = {part: self._names(part) for part in sorted(known)}
        self._include.check(names, f"{source} or this run")
        self._ignore.check(names, f"{source} or this run")

    def result(self) -> tuple[dict[str, Any], LoadTable]:
        table, states = LoadTable(self._source), dict[str, Any]()
        for part in sorted({*self._saved, *self._here}, key=lambda part: (part != "model", part)):
            row = self._row(part)
            table.rows.append(row)
            if row.outcome == "loaded":
                states[part] = self._merged(part, row)
            elif row.outcome == "waits":
                states[part] = self._saved[part]
        return states, table

    def _row(self, part: str) -> PartRow:
        if not self._is_selected(part):
            return PartRow(part, "skipped" if part in self._saved else "as built")
        if part not in self._saved:
            return PartRow(part, "not saved" if part in self._left_out else "missing")
        if part not in self._here:
            return PartRow(part, "waits" if self._plan.strict else "unclaimed")
        row = PartRow(part, "loaded")
        entries, left_out = self._entries(part), self._left_out.get(part, ())
        if entries is None:
            return row
        own = self._own_entries(part)
        for name in {**entries, **dict.fromkeys(own)}:
            if not self._is_asked_for(part, name):
                row.skipped.append(name)
            elif name in left_out and (name not in entries or entries[name] is None):
                row.left_out.append(name)
            elif name not in entries:
                row.missing.append(name)
            elif name not in own:
                row.unexpected.append(name)
            elif (shapes := self._shapes(part, name)) and shapes[0] != shapes[1]:
                row.reshaped.append(f"{name} (saved {shapes[0]}, here {shapes[1]})")
            else:
                row.loaded.append(name)
        return row

    def _is_selected(self, part: str) -> bool:
        if part in self._held and self._held[part] is None:
            return False
        if getattr(self._here.get(part), "belongs_to_its_run", False):
            return part in (self._plan.parts or ())
        return (self._parts is None or self._parts.has_part(part)) and not self._ignore.has_part(part)

    def _is_asked_for(self, part: str, name: str) -> bool:
        if name in (self._held.get(part) or ()):
            return False
        if self._include.concern(part) and not self._include.has_name(part, name):
            return False
        return not self._ignore.has_name(part, name)

    def _merged(self, part: str, row: PartRow) -> Any:
        saved = self._saved[part]
        entries = self._entries(part)
        if entries is None:
            return saved
        whole = not (row.skipped or row.left_out or row.differences)
        continues = self._is_selected("trainer") and "trainer" in self._saved
        form, kind = self._form(part), self._kind(part)
        if whole and (continues or form != "optimizer"):
            return saved
        both = {**self._own_entries(part), **{name: entries[name] for name in row.loaded}}
        return part_names.with_entries(self._own_state(part) if form == "optimizer" else saved, both, kind)

    def _form(self, part: str) -> str | None:
        return part_names.form_of(self._saved[part], self._kind(part))

    def _shapes(self, part: str, name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Saved and own shape of what is called ``name``; for an optimizer's state that of the model's parameter."""
        if self._form(part) == "optimizer":
            part = "model"
            if part not in self._here or part not in self._saved:
                return None
        saved, own = (self._entries(part) or {}).get(name), self._own_entries(part).get(name)
        if not (isinstance(saved, Tensor) and isinstance(own, Tensor)):
            return None
        return tuple(saved.shape), tuple(own.shape)

    def _names(self, part: str) -> Iterable[str]:
        # state_dict() only of what will be loaded: it makes an average start
        asked = (self._include.concern(part) or self._ignore.concern(part)) and self._is_selected(part)
        saved = self._entries(part)
        own = self._own_entries(part) if asked and saved and part in self._here else {}
        return [*(saved or {}), *own, *self._left_out.get(part, ())]

    def _entries(self, part: str) -> dict[str, Any] | None:
        if part not in self._named:
            entries = part_names.named(self._saved.get(part), self._kind(part))
            empty = entries is None and part in self._saved and bool(self._left_out.get(part))
            self._named[part] = {} if empty else entries
        return self._named[part]

    def _own_entries(self, part: str) -> dict[str, Any]:
        if part not in self._own_named:
            self._own_named[part] = part_names.named(self._own_state(part), self._kind(part)) or {}
        return self._own_named[part]

    def _own_state(self, part: str) -> Any:
        if part not in self._own:
            self._own[part] = self._here[part].state_dict()
        return self._own[part]

    def _weighted(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        if self._plan.weights == "raw":
            return dict(saved)
        known = part_names.averages(saved, self._kind)
        if self._plan.weights not in known:
            raise ValueError(
                f"weights={self._plan.weights!r}, but {self._source} holds no average of that name; "
                f"expected raw{''.join(f' or {average}' for average in known)}."
            )
        return {**saved, "model": {**saved.get("model", {}), **known[self._plan.weights]}}


class _Renaming:
    """Old names to new ones; remembers which rules were of use."""

    def __init__(self, rules: Mapping[str, str], source: str, kind: Callable[[str], str]) -> None:
        self._rules, self._source, self._kind = {old: renaming(old, new) for old, new in rules.items()}, source, kind
        self._unused = set(rules)

    def __call__(self, name: str) -> str:
        for old, rename in self._rules.items():
            if (renamed := rename(name)) is not None:
                self._unused.discard(old)
                return renamed
        return name

    def state(self, part: str, state: Any) -> Any:
        entries = part_names.named(state, self._kind(part)) if self._rules else None
        if not entries:
            return state
        names = {name: self(name) for name in entries}
        if len(set(names.values())) < len(names):
            twice = next(new for new in names.values() if list(names.values()).count(new) > 1)
            both = [old for old, new in names.items() if new == twice]
            raise ValueError(f"rename makes {twice!r} of both {both[0]!r} and {both[1]!r} in {part} of {self._source}.")
        return part_names.with_names(state, names, self._kind(part))

    def check(self) -> None:
        if self._unused:
            raise ValueError(f"rename: {sorted(self._unused)[0]!r} matches no name in {self._source}.")
