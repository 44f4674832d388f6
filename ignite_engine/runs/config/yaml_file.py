"""Reads a config file: YAML without duplicate keys, ``section.key=value`` overrides, and errors of one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ignite_engine.errors import did_you_mean

# 1e-3 has no dot, so YAML 1.1 reads it as text.
SCIENTIFIC = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")


class ConfigError(ValueError):
    """A mistake in a config, its overrides or its task: one line with file, key, value and expectation."""


class ConfigWarning(UserWarning):
    """A setting that has no effect with the others as they are."""


class Loader(yaml.SafeLoader):
    """YAML's safe subset, in which ``1e-3`` is a number."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^{SCIENTIFIC.pattern}$"), list("-+.0123456789"))


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
        if key not in self.lines and any(name.startswith(f"{key}.") for name in self.overridden):
            return "command line"
        for name in _ancestors(key):
            if name in self.overridden:
                return "command line"
            if name in self.lines:
                return f"{self.path}:{self.lines[name]}"
        return str(self.path or self.name)

    def say(self, key: str, complaint: str) -> str:
        """A line about ``key``, or about all of them where it is empty: its place, its name, and the complaint.

        The arguments of a function are its task.
        """
        key = "" if key == "task" and self.name != "config" else self.arguments.get(key, key)
        return f"{self.place(key)}: {key}: {complaint}" if key else f"{self.place(key)}: {complaint}"

    def say_of(self, key: str, sentence: str) -> str:
        """A line about ``key``, which the sentence names."""
        return f"{self.place(key)}: {sentence}"


def read_config_source(path: Path, overrides: Sequence[str] = ()) -> ConfigSource:
    """Read ``path`` and merge the overrides into it.

    Raises:
        ConfigError: the file is missing, unreadable, broken, empty or not a mapping; a key is given twice; an
            override is not ``section.key=value``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_near_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a folder, expected a YAML file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: this is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except OSError as error:
        raise ConfigError(f"{path}: the file cannot be read: {error.strerror or error}.") from None
    source = ConfigSource({}, path)
    values = _parse(text, str(path), source.lines)
    if values is None:
        raise ConfigError(f"{path}: the file is empty, expected sections such as 'run:' and 'task:'.")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got {display(values)}, expected a mapping of sections such as 'run:' and 'task:'.")
    source.values = values
    for override in overrides:
        _apply_override(source, override)
    return source


def display(value: object) -> str:
    """A value for an error message: never more than a line of 80 characters."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, Mapping):
        text = f"the mapping {value!r}" if value else "an empty mapping"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def _parse(text: str, name: str, lines: dict[str, int]) -> Any:
    """The value of YAML ``text``; ``lines`` is filled with the line of every key."""
    try:
        loader = Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_keys(node, name, "", lines, set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}" if mark else ""
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{name}{place}: this is not YAML: {' '.join(what.split())}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}: this is not YAML: {' '.join(str(error).split())}.") from None


def _check_keys(node: yaml.Node, name: str, prefix: str, lines: dict[str, int], entered: set[int]) -> None:
    """Refuse keys given twice, and keys that are not text, anywhere below ``node``."""
    if id(node) in entered:  # an alias
        return
    entered.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _check_keys(item, name, f"{prefix}{index}.", lines, entered)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or key_node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            text = display(key) if key is not None else "a list or mapping"
            raise ConfigError(
                f"{name}:{line}: got {text} as a key, expected text; quote it (YAML reads on, yes, 1 as values)."
            )
        dotted = f"{prefix}{key}"
        if key in seen:
            raise ConfigError(
                f"{name}:{line}: {dotted}: the key is given twice, first on line {seen[key]}; remove one."
            )
        seen[key] = line
        lines[dotted] = line
        _check_keys(value_node, name, f"{dotted}.", lines, entered)


def _apply_override(source: ConfigSource, override: str) -> None:
    """Put one ``section.key=value`` into the source's values."""
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(part and not part.isspace() for part in parts):
        raise ConfigError(
            f"command line: {override}: got {override!r}, expected section.key=value, such as run.seed=1."
        )
    value = _parse(text, f"command line: {key}", {})
    inner = source.values
    for depth, part in enumerate(parts[:-1], start=1):
        below = inner.get(part)
        if below is None:
            below = inner[part] = {}
        if not isinstance(below, dict):
            outer = ".".join(parts[:depth])
            raise ConfigError(
                f"command line: {key}: {outer} is {display(below)} and has no keys of its own; give {outer}=..."
            )
        inner = below
    inner[parts[-1]] = value
    source.overridden.add(key)


def _ancestors(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f", nor its folder {path.parent}."
    return did_you_mean(path.name, sorted(file.name for file in path.parent.glob("*.y*ml")))
