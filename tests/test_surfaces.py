"""What users build on: public names, config keys and command-line options, compared with ``tests/surfaces.txt``.

A change of a surface is a change of that file, so it is seen in review. ``python -m tests.test_surfaces`` rewrites it.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

FROZEN = Path(__file__).with_name("surfaces.txt")
MODULES = (
    "ignite_engine",
    "ignite_engine.accumulation",
    "ignite_engine.checkpointing",
    "ignite_engine.config",
    "ignite_engine.data",
    "ignite_engine.events",
    "ignite_engine.handlers",
    "ignite_engine.ranks",
    "ignite_engine.replay",
    "ignite_engine.sparse",
    "ignite_engine.trainer",
    "ignite_engine.update",
)


def surfaces() -> list[str]:
    """The lines of the file, one for each name, key and option."""
    from ignite_engine.cli.arguments import make_parser
    from ignite_engine.config import Config

    schema = Config.model_json_schema(mode="validation")
    lines = ["# Rewrite with: python -m tests.test_surfaces"]
    for name in MODULES:
        lines += ["", f"[names of {name}]", *_names(importlib.import_module(name))]
    lines += ["", "[config keys]", *_keys(schema, schema["$defs"], "")]
    _, commands = make_parser()
    for name, command in _leaves(commands):
        lines += ["", f"[options of {name}]", *_options(command)]
    return lines


def _names(module: ModuleType) -> Iterator[str]:
    """``__all__``, or else the classes and functions that are defined in it; the members of its enums."""
    listed = getattr(module, "__all__", None)
    for name in sorted(set(vars(module)) | set(listed or ())):
        value = getattr(module, name)  # some are imported when they are asked for
        home = str(getattr(value, "__module__", ""))
        defined = home == module.__name__ or home.startswith(f"{module.__name__}.")
        is_code = inspect.isclass(value) or inspect.isroutine(value)
        if name in listed if listed is not None else not name.startswith("_") and is_code and defined:
            yield name
            if isinstance(value, type) and issubclass(value, enum.Enum) and defined:
                yield from (f"{name}.{member}" for member in value.__members__)


def _keys(section: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, field in section["properties"].items():
        inner = definitions.get(field.get("oneOf", [field])[0].get("$ref", "").rpartition("/")[2], {})
        if "oneOf" in field:  # one section, or a list of them
            yield f"{prefix}{name}: {_type(field)}"
        if name != prefix and inner.get("title", "").endswith("Section"):
            yield from _keys(inner, definitions, f"{prefix}{name}.")
            continue
        default = json.dumps(field.get("default", {}))  # the one made by a factory is an empty mapping
        yield f"{prefix}{name}: {_type(field)} " + (
            "required" if name in section.get("required", ()) else f"= {default}"
        )
    if section.get("additionalProperties"):
        yield f"{prefix}*: any"


def _type(field: Mapping[str, Any]) -> str:
    """A JSON schema in few words."""
    for union in ("anyOf", "oneOf"):
        if union in field:
            return " | ".join(_type(each) for each in field[union])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        return " | ".join(json.dumps(each) for each in field["enum"])
    kind = str(field.get("type", "any"))
    if "items" in field:
        kind = f"{kind} of {_type(field['items'])}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[key]}" for key, sign in signs.items() if key in field]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _leaves(commands: Mapping[str, argparse.ArgumentParser], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command, and in the place of one that has actions its actions."""
    for name, command in sorted(commands.items()):
        actions = [each for each in command._actions if isinstance(each, argparse._SubParsersAction)]
        if actions:
            yield from _leaves(actions[0].choices, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _options(command: argparse.ArgumentParser) -> Iterator[str]:
    for each in command._actions:
        if each.help == argparse.SUPPRESS or isinstance(each, argparse._HelpAction):
            continue
        words = [*each.option_strings] or [each.dest]
        if each.nargs != 0:
            words.append(str(each.metavar or "|".join(each.choices or ())).strip())
        is_list = not each.option_strings and each.nargs == "*"
        words.append("any number" if is_list else "required" if each.required else f"= {json.dumps(each.default)}")
        yield " ".join(word for word in words if word)


def test_public_surfaces_are_as_they_were() -> None:
    frozen, now = FROZEN.read_text(encoding="utf-8").splitlines(), surfaces()
    lost, new = [line for line in frozen if line not in now], [line for line in now if line not in frozen]

    assert now == frozen, (
        f"lost: {lost}, new: {new}. If it is meant: python -m tests.test_surfaces; CHANGELOG.md says "
        "what replaces a lost name, and a new config key replaces an old one (see Checklists in CONTRIBUTING.md)"
    )


if __name__ == "__main__":
    FROZEN.write_text("\n".join(surfaces()) + "\n", encoding="utf-8")
