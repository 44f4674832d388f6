"""Reads a config file: YAML without duplicate keys, ``section.key=value`` overrides, and errors of one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ignite_engine.errors import did_you_mean, one_line

# 1e-3 has no dot, so YAML 1.1 reads it as text.
_SCIENTIFIC = re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")


class ConfigError(ValueError):
    """A mistake in a config, its overrides or its task: one line with file, key, value and expectation."""


class ConfigWarning(UserWarning):
    """A setting that has no effect with the others as they are."""


class Loader(yaml.SafeLoader):
    """YAML's safe subset, in which ``1e-3`` is a number."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))


@dataclass
class ConfigSource:
    """Nested values and where each came from.

    Attributes:
        values: the mapping of sections, overrides merged in.
        path: the file; None for values that were not read from one.
        lines: the line, from 1, of each key of the file, by its dotted name.
        overridden: the dotted names set on the command line.
        name: what messages call values that were not read from a file.
        arguments: of the call that gave them, by the dotted name of the setting that each is.
    """

    values: dict[str, Any]
    path: Path | None = None
    lines: dict[str, int] = field(default_factory=dict)
    overridden: set[str] = field(default_factory=set)
    name: str = "config"
    arguments: Mapping[str, str] = field(default_factory=dict)

    def place(self, key: str) -> str:
        """The file and line, or the command line, that set ``key`` or the section it is missing from."""
        if self.path is None:
            return self.name
        if key not in self.lines and any(name.startswith(f"{key}.") for name in self.overridden):
            return "command line"
        name = key
        while name:
            if name in self.overridden:
                return "command line"
            if name in self.lines:
                return f"{self.path}:{self.lines[name]}"
            name = name.rpartition(".")[0]
        return str(self.path)

    def say(self, key: str, complaint: str) -> str:
        """A line about ``key``, or about all of them where it is empty: its place, its name, and the complaint."""
        shown = self.arguments.get(key, key)
        return f"{self.place(key)}: {shown}: {complaint}" if shown else f"{self.place(key)}: {complaint}"

    def put(self, key: str, value: Any) -> None:
        """Set what a dotted name stands for, over what is there.

        Raises:
            ConfigError: something on the way to it has no keys.
        """
        inner = self.values
        *sections, last = key.split(".")
        self.overridden.add(key)
        for section in sections:
            if inner.get(section) is None:
                inner[section] = {}
            inner = inner[section]
            if not isinstance(inner, dict):
                raise ConfigError(self.say(key, f"{section} is {display(inner)} and has no keys of its own."))
        inner[last] = value
        self.lines = {name: line for name, line in self.lines.items() if not name.startswith(f"{key}.")}


def read_config_source(path: Path, overrides: Sequence[str] = ()) -> ConfigSource:
    """Read ``path`` and merge the overrides into it.

    Raises:
        ConfigError: the file is missing, unreadable, broken, empty or not a mapping; a key is given twice; an
            override is not ``section.key=value``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = did_you_mean(path.name, sorted(file.name for file in path.parent.glob("*.y*ml")))
        raise ConfigError(f"{path}: there is no such file{near}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a YAML file in UTF-8: {one_line(error)}.") from None
    source = ConfigSource({}, path)
    values = _parse(text, str(path), source.lines)
    if not isinstance(values, dict):
        got = "the file is empty" if values is None else f"got {display(values)}"
        raise ConfigError(f"{path}: {got}, expected a mapping of sections such as 'run:' and 'task:'.")
    source.values = values
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise ConfigError(
                f"command line: {override}: got {override!r}, expected section.key=value, such as run.seed=1."
            )
        source.put(key, _parse(text, f"command line: {key}", {}))
    return source


def display(value: object) -> str:
    """A value for an error message: never more than a line of 80 characters."""
    text = " ".join(repr(value).split())
    if value is None or isinstance(value, bool):
        text = "nothing" if value is None else text.lower()
    elif isinstance(value, Mapping):
        text = f"the mapping {text}"
    return text if len(text) <= 80 else text[:77] + "..."


def _parse(text: str, name: str, lines: dict[str, int]) -> Any:
    """The value of YAML ``text``; ``lines`` is filled with the line of every key."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, name, "", lines)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = f":{mark.line + 1}" if mark else ""
        what = [getattr(error, "context", None), getattr(error, "problem", None) or str(error)]
        shown = " ".join(" ".join(filter(None, what)).split())
        raise ConfigError(f"{name}{place}: this is not YAML: {shown}.") from None


def _check_keys(node: yaml.Node, name: str, prefix: str, lines: dict[str, int]) -> None:
    """Refuse keys given twice, and keys that are not text, anywhere below ``node``."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _check_keys(item, name, f"{prefix}{index}.", lines)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            text = display(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise ConfigError(
                f"{name}:{line}: got {text} as a key, expected text; quote it (YAML reads on, yes, 1 as values)."
            )
        dotted = f"{prefix}{key.value}"
        if dotted in seen:
            raise ConfigError(
                f"{name}:{line}: {dotted}: the key is given twice, first on line {seen[dotted]}; remove one."
            )
        seen[dotted] = lines[dotted] = line
        _check_keys(value, name, f"{dotted}.", lines)
