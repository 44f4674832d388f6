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
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from ignite_engine.errors import did_you_mean, is_number, is_whole
from ignite_engine.runs.config.yaml_file import display
from ignite_engine.runs.task import TaskError, find_object

Table = Mapping[str, Any]
"""What names stand for: objects, or ``module:object``, which is imported when it is used."""

_MISSING = object()


class Fault(ValueError):
    """Mistakes in an entry: the dotted key of each inside of the entry, and what is wrong with it."""

    def __init__(self, *mistakes: tuple[str, str]) -> None:
        super().__init__("; ".join(": ".join(filter(None, mistake)) for mistake in mistakes))
        self.mistakes = mistakes

    def inside(self, key: str) -> Fault:
        """The same mistakes seen from outside of ``key``."""
        return Fault(*((".".join(filter(None, (key, inner))), complaint) for inner, complaint in self.mistakes))


class Only(NamedTuple):
    """In ``Annotated``: which values of a type are meant."""

    fits: Callable[[Any], bool]
    expected: str


# -- objects by name --------------------------------------------------------------------------------------------------


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
    make, arguments = checked_entry(entry, table, key=key, skip=len(args), given=given or ())
    known, _ = parameters_of(make)
    supplied = {name: supply() for name, supply in (given or {}).items() if name in known and name not in arguments}
    try:
        return make(*args, **supplied, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refusal_of(error, name_of(make), arguments) from error


def checked_entry(
    entry: Mapping[str, Any], table: Table, *, key: str = "name", skip: int = 0, given: Collection[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """What an entry names and its arguments, both checked; nothing is made."""
    make = lookup(entry[key], table, key=key)
    rest = {name: value for name, value in entry.items() if name != key}
    return make, checked(make, rest, skip=skip, given=given, beside=(key,))


def lookup(name: object, table: Table, *, key: str, folder: Path | None = None) -> Any:
    """What ``name`` stands for: in the table, or under ``use`` in a file or module of the user's, ``my_file.py:Name``.

    Args:
        folder: where such a file is looked for first.
    """
    fitting(name, str, key)
    found = table.get(str(name))
    try:
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            return getattr(importlib.import_module(module), attribute)
        if found is None and key == "use" and ":" in str(name):
            return find_object(str(name), folder)
    except (ModuleNotFoundError, TaskError) as error:
        raise Fault((key, str(error))) from (error.__cause__ or error)
    if found is None:
        raise Fault((key, f"got {name!r}, which is not known{did_you_mean(str(name), table, limit=40)}"))
    return found


def refusal_of(error: Exception, name: str, arguments: Mapping[str, Any]) -> Fault:
    """What has raised at these arguments, as a mistake in the one that the error speaks of."""
    if isinstance(error, Fault):
        return error
    complaint = " ".join(str(error).split())
    names = [key for key in arguments if re.search(rf"\b{re.escape(key.rstrip('s'))}", complaint, re.IGNORECASE)]
    if "got" not in complaint:
        # a text may hold a password
        shown = [f"got {display(arguments[key])}, but " for key in names[:1] if not isinstance(arguments[key], str)]
        complaint = f"{''.join(shown)}{name} says: {complaint.rstrip('.')}."
    return Fault((names[0] if names else "", complaint))


def name_of(make: Any) -> str:
    """As messages show it; ``data`` for a ``DataSection``."""
    name = str(getattr(make, "__name__", type(make).__name__))
    return name.removesuffix("Section").lower() if name.endswith("Section") else name


# -- arguments and their types ----------------------------------------------------------------------------------------


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
            raise Fault(("", f"this is missing: {name_of(make)} needs it."))
        if name in known:
            kind = known[name].annotation
            sections = [each for each in (kind, *get_args(kind)) if is_dataclass(each)]
            return section(sections[0], value) if sections and value is not None else fitting(value, kind)
        if not takes_any:
            near = did_you_mean(name, [*known, *beside], limit=40)
            raise Fault(("", f"got {display(value)}, but {name_of(make)} has no '{name}'{near}"))
        return value

    needed = {name for name, parameter in known.items() if parameter.default is parameter.empty}
    if values.keys() <= known.keys():  # else one is misspelt, which is why another is missing
        values = {**dict.fromkeys(needed - {*given}, _MISSING), **values}
    return for_each(values.items(), check)


def section(kind: Any, values: Any) -> Any:
    """A dataclass of these values."""
    return kind(**checked(kind, fitting(values, Mapping)))


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
    try:
        signature = inspect.signature(make, eval_str=True)
    except NameError:  # of what is imported for type checkers alone
        signature = inspect.signature(make)
    parameters = [*signature.parameters.values()][skip:]
    known = {each.name: each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    return known, any(each.kind is each.VAR_KEYWORD for each in parameters)


def fitting(value: Any, kind: Any, key: str = "") -> Any:
    """``value``, which is to be of a type, numbers as in Python.

    Raises:
        Fault: it is of another one.
    """
    if not _fits(value, kind):
        expected = expected_of(kind)
        near = did_you_mean(str(value), re.findall("'(.*?)'", expected))
        end = near if near.startswith("; did you mean") else "."
        raise Fault((key, f"got {display(value)}, expected {expected}{end}"))
    return value


def _fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        return _fits(value, inner[0]) and all(only.fits(value) for only in inner[1:])
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if origin in _PLAIN:
        return _PLAIN[origin].fits(value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(_fits(element, inner[1]) for element in value.values() if inner)
    if origin in _LISTS:
        if not isinstance(value, list | tuple) or (_is_row(kind) and len(value) != len(inner)):
            return False
        return all(map(_fits, value, inner if _is_row(kind) else inner[:1] * len(value)))
    is_any = not isinstance(origin, type) or origin in (inspect.Parameter.empty, Any)
    return is_any or isinstance(value, origin)


def expected_of(kind: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        return ", ".join([expected_of(inner[0]), *(only.expected for only in inner[1:])])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(expected_of(each) for each in inner if each is not NoneType))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in _PLAIN:
        return _PLAIN[origin].expected
    if origin in _LISTS:
        return f"a list of {len(inner)}" if _is_row(kind) else "a list"
    return "a mapping" if origin in (dict, Mapping) else f"a {origin.__name__}"


def _is_row(kind: Any) -> bool:
    """Whether it is a tuple of so many elements."""
    return get_origin(kind) is tuple and ... not in get_args(kind)


_LISTS = (list, tuple, Sequence, Collection, Iterable)
_PATH = Only(lambda value: isinstance(value, str | PathLike), "a path")
_PLAIN: dict[Any, Only] = {
    NoneType: Only(lambda value: value is None, "null"),
    bool: Only(lambda value: isinstance(value, bool), "true or false"),
    int: Only(is_whole, "a whole number"),
    float: Only(lambda value: is_number(value) and math.isfinite(value), "a number"),
    str: Only(lambda value: isinstance(value, str), "text"),
    Path: _PATH,
    PathLike: _PATH,
    Callable: Only(callable, "a function"),
}
