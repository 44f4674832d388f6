"""Writes the tables of docs/configuration.md: a row for each field of a config's sections, told by its comment."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import yaml

from ignite_engine.runs.config import config_from_dict, sections

PAGE = Path(__file__).resolve().parents[1] / "configuration.md"
SECTIONS = {
    "run": sections.RunSection,
    "data": sections.DataSection,
    "update": sections.UpdateSection,
    "distributed": sections.DistributedSection,
}
_FIELD = re.compile(r"^    (\w+): .*  # (.*)$", re.MULTILINE)
_TABLE = re.compile(r"(<!-- settings of (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """The text of the page with the tables of now between its markers."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{table(match[2])}\n", page)


def table(section: str) -> str:
    """Key, meaning, choices and default of each setting of a section."""
    kind = SECTIONS[section]
    meanings = dict(_FIELD.findall(inspect.getsource(kind)))
    defaults = config_from_dict({"task": "task.py:build", "run": {"max_epochs": 1}}).to_dict()[section]
    defaults |= dict.fromkeys(["max_epochs", "name", "directory"] if section == "run" else [])
    hints = get_type_hints(kind)
    rows = ["| key | meaning | default |", "|---|---|---|"]
    for field in fields(kind):
        meaning = meanings[field.name] + _choices(hints[field.name])
        default = (
            yaml.safe_dump(defaults.get(field.name), default_flow_style=True, width=1000).removesuffix("...\n").strip()
        )
        rows.append(f"| `{section}.{field.name}` | {meaning} | `{default}` |")
    return "\n".join(rows) + "\n"


def _choices(hint: object) -> str:
    """The values of a ``Literal``, which may be optional, in parentheses."""
    if get_origin(hint) is Annotated:
        return ""
    literals = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
    choices = [f"`{value}`" for literal in literals for value in get_args(literal)]
    return f" ({', '.join(choices)})" if choices else ""


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
