"""``named``: an object from a name and its arguments, checked against the signature of what the name stands for."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ignite_engine.errors import did_you_mean, is_number, is_whole
from ignite_engine.runs.config.yaml_file import display
from ignite_engine.runs.task import TaskError, find_object

Table = Mapping[str, Any]
"""What names stand for: objects, or ``module:object``, which is imported when it is used."""

_MISSING = object()
_SEQUENCES = (list, tuple, Sequence, Collection, Iterable)


class Fault(ValueError):
    """Mistakes in an entry: the dotted key of each inside of the entry, and what is wrong with it."""

    def __init__(self, *mistakes: tuple[str, str]) -> None:
        super().__init__("; ".join(": ".join(filter(None, mistake)) for mistake in mistakes))
        self.mistakes = mistakes

    def inside(self, key: str) -> Fault:
        """The same mistakes seen from outside of ``key``."""
        return Fault(*((".".join(filter(None, (key, inner))), complaint) for inner, complaint in self.mistakes))


class WrongType(Fault):
    """A value of another type, or out of the range, that its annotation says."""

    def __init__(self, value: object, expected: str, near: str = ".") -> None:
        super().__init__(("", f"got {display(value)}, expected {expected}{near}"))
        self.expected = expected


def only(fits: Callable[[Any], bool], expected: str) -> Callable[[Any], Any]:
    """For ``Annotated``: a value that fits."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise WrongType(value, expected)
        return value

    return check


def named(
    entry: Mapping[str, Any],
    table: Table,
    *args: Any,
    key: str = "name",
    given: Mapping[str, Callable[[], Any]] | None = None,
) -> Any:
    """Make what ``entry`` names, with the arguments that it gives.

    Args:
        entry: the name, under ``key``, and arguments by name.
        args: arguments that come before those of the entry.
        given: functions that make arguments which the entry leaves out, for what takes arguments of these names.

    Raises:
        Fault: the name or an argument is not known, one is missing or of another type, or what is made refuses them.
    """
    make = lookup(entry[key], table, key=key)
    rest = {name: value for name, value in entry.items() if name != key}
    arguments = checked(make, rest, skip=len(args), given=given or (), beside=(key,))
    known, _ = parameters_of(make, len(args))
    supplied = {name: supply() for name, supply in (given or {}).items() if name in known and name not in arguments}
    try:
        return make(*args, **supplied, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refusal_of(error, getattr(make, "__name__", str(entry[key])), arguments) from error


def checked_entry(entry: Mapping[str, Any], table: Table, *, key: str = "name", skip: int = 0) -> None:
    """Refuse an entry whose name or arguments are not known, or of another type; nothing is made."""
    rest = {name: value for name, value in entry.items() if name != key}
    checked(lookup(entry[key], table, key=key), rest, skip=skip, beside=(key,))


def lookup(name: object, table: Table, *, key: str, folder: Path | None = None) -> Any:
    """What ``name`` stands for: in the table, or under ``use`` in a file or module of the user's, ``my_file.py:Name``.

    Args:
        folder: where such a file is looked for first.
    """
    if not isinstance(name, str):
        raise WrongType(name, "text").inside(key)
    found = table.get(name)
    try:
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            return getattr(importlib.import_module(module), attribute)
        if found is None and key == "use" and ":" in name:
            return find_object(name, folder)
    except ModuleNotFoundError as error:
        raise Fault((key, f"got {name!r}, which cannot be used here: {error}.")) from error
    except TaskError as error:
        raise Fault((key, str(error))) from error.__cause__
    if found is None:
        raise Fault((key, f"got {name!r}, which is not known{did_you_mean(name, table)}"))
    return found


def refusal_of(error: Exception, name: str, arguments: Mapping[str, Any]) -> Fault:
    """What has raised at these arguments, as a mistake in the one that the error speaks of."""
    if isinstance(error, Fault):
        return error
    complaint = " ".join(str(error).split())
    names = [key for key in arguments if re.search(rf"\b{re.escape(key.rstrip('s'))}", complaint, re.IGNORECASE)]
    key = names[0] if names else ""
    if "got" not in complaint:
        # a text may hold a password
        shown = f"got {display(arguments[key])}, but " if key and not isinstance(arguments[key], str) else ""
        complaint = f"{shown}{name} says: {complaint.rstrip('.')}."
    return Fault((key, complaint))


def checked(
    make: Callable[..., Any],
    values: Mapping[str, Any],
    *,
    skip: int = 0,
    given: Collection[str] = (),
    beside: Collection[str] = (),
) -> dict[str, Any]:
    """``values`` as arguments of ``make``.

    Args:
        skip: its first parameters, which are given otherwise.
        given: names of arguments that may be missing.
        beside: other keys that an entry may have, which may have been meant.

    Raises:
        Fault: all mistakes.
    """
    known, takes_any = parameters_of(make, skip)

    def check(name: str, value: object) -> object:
        if value is _MISSING:
            raise Fault(("", f"this is missing: {_name_of(make)} needs it."))
        if name in known:
            return fitted(value, known[name].annotation)
        if not takes_any:
            near = did_you_mean(name, [*known, *beside], limit=40)
            raise Fault(("", f"got {display(value)}, but {_name_of(make)} has no '{name}'{near}"))
        return value

    asked = {name for name, parameter in known.items() if parameter.default is parameter.empty}
    if values.keys() <= known.keys():  # else one is misspelt, which is why another is missing
        values = {**dict.fromkeys(asked - {*given}, _MISSING), **values}
    return for_each(values.items(), check)


def for_each(values: Iterable[tuple[str, Any]], check: Callable[[str, Any], Any]) -> dict[str, Any]:
    """``check(key, value)`` of each.

    Raises:
        Fault: the mistakes of all.
    """
    results: dict[str, Any] = {}
    mistakes: list[tuple[str, str]] = []
    for key, value in values:
        try:
            results[key] = check(key, value)
        except Fault as fault:
            mistakes += fault.inside(key).mistakes
    if mistakes:
        raise Fault(*mistakes)
    return results


def parameters_of(make: Callable[..., Any], skip: int = 0) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters by name, annotations evaluated, and whether any other name is taken, too."""
    is_plain_class = isinstance(make, type) and not is_dataclass(make)
    try:
        hints = get_type_hints(make.__init__ if is_plain_class else make, include_extras=True)
    except (NameError, TypeError):  # of what is imported for type checkers alone
        hints = {}
    known: dict[str, inspect.Parameter] = {}
    takes_any = False
    for parameter in [*inspect.signature(make).parameters.values()][skip:]:
        written = Any if parameter.annotation is parameter.empty else parameter.annotation
        hint = hints.get(parameter.name, Any if isinstance(written, str) else written)
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            if hint is Any and type(parameter.default) in (bool, int, float):
                hint = bool if type(parameter.default) is bool else float
            known[parameter.name] = parameter.replace(annotation=hint)
    return known, takes_any


def fitted(value: Any, kind: Any) -> Any:
    """``value`` as its annotation wants it: a list as a tuple, a mapping as a section; numbers stay as they are.

    Annotated types may carry functions that check the value, or replace it.

    Raises:
        Fault: it does not fit.
    """
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        value = fitted(value, inner[0])
        for check in inner[1:]:
            value = check(value)
        return value
    if origin in (Union, UnionType):
        return _one_of(value, inner)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in inner):
            return value
        near = did_you_mean(value, map(str, inner)) if isinstance(value, str) else "."
        raise WrongType(value, _either(map(repr, inner)), near if "did you mean" in near else ".")
    if origin in _SEQUENCES:
        if not isinstance(value, list | tuple):
            raise WrongType(value, "a list")
        kinds = inner if origin is tuple and inner and inner[-1] is not ... else [*inner[:1], Any][:1] * len(value)
        if len(kinds) != len(value):
            raise WrongType(value, f"a list of {len(kinds)}")
        places = ((str(place), element) for place, element in enumerate(value))
        elements = for_each(places, lambda place, element: fitted(element, kinds[int(place)]))
        return tuple(elements.values()) if origin is tuple else list(elements.values())
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise WrongType(value, "a mapping")
        return for_each(value.items(), lambda key, element: fitted(element, inner[1])) if inner else dict(value)
    if is_dataclass(origin) and isinstance(origin, type):
        if not isinstance(value, Mapping | None):
            raise WrongType(value, "a mapping of settings")
        return origin(**checked(origin, value or {}))
    if origin not in _PLAIN and origin is not Any and isinstance(origin, type) and not isinstance(value, origin):
        raise WrongType(value, f"a {origin.__name__}")
    return _PLAIN.get(origin, lambda value: value)(value)


_PATH = only(lambda value: isinstance(value, str | PathLike), "a path")
_PLAIN: dict[Any, Callable[[Any], Any]] = {
    NoneType: only(lambda value: value is None, "null"),
    bool: only(lambda value: isinstance(value, bool), "true or false"),
    int: only(is_whole, "a whole number"),
    float: only(lambda value: is_number(value) and math.isfinite(value), "a number"),
    str: only(lambda value: isinstance(value, str), "text"),
    Path: _PATH,
    PathLike: _PATH,
    Callable: only(callable, "a function"),
}


def _one_of(value: Any, kinds: Iterable[Any]) -> Any:
    """``value`` as the first of several types that it fits."""
    faults = []
    for kind in kinds:
        try:
            return fitted(value, kind)
        except Fault as fault:
            faults.append(fault)
    if near := [fault for fault in faults if not isinstance(fault, WrongType)]:
        raise near[0]
    if len(faults) == 2 and isinstance(faults[1], WrongType) and faults[1].expected == "null":
        raise faults[0]
    raise WrongType(value, _either(dict.fromkeys(fault.expected for fault in faults if isinstance(fault, WrongType))))


def _either(words: Iterable[str]) -> str:
    *first, last = [word for word in words if word != "null"]
    return f"{', '.join(first)} or {last}" if first else last


def _name_of(make: Any) -> str:
    name = str(getattr(make, "__name__", type(make).__name__))
    return name.removesuffix("Section").lower() if name.endswith("Section") else name
