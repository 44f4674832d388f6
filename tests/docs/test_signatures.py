"""The signatures in the docs are those of the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import ignite_engine
from ignite_engine import handlers

SHOWN_BY_A_CALL = ("SaveEvery", "StopFile", "WallClockLimit")
DOCS = Path(__file__).resolve().parents[2] / "docs"


def signature_of(obj: Any) -> str:
    """Names and defaults, without annotations and without the ``name`` in checkpoints that every handler takes."""
    words: list[str] = []
    for name, parameter in inspect.signature(obj).parameters.items():
        if name == "self" or (name == "name" and parameter.default is not parameter.empty):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        if parameter.kind is parameter.VAR_KEYWORD:
            words.append(f"**{name}")
        elif parameter.default is parameter.empty:
            words.append(name)
        else:
            words.append(f"{name}={parameter.default!r}".replace("'", '"').replace("<factory>", "{}"))
    return ", ".join(words)


def test_table_of_python_api_has_the_signatures_of_the_code() -> None:
    page = (DOCS / "python_api.md").read_text(encoding="utf-8").partition("## Signatures")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)\(([^`]*)\)` \|", page, flags=re.MULTILINE)
    assert len(rows) >= 12
    for name, written in rows:
        obj: Any = ignite_engine
        for part in name.split("."):
            obj = getattr(obj, part)
        assert written == signature_of(obj), f"write `{name}({signature_of(obj)})` in docs/python_api.md"


def test_signatures_of_handlers_are_those_of_the_code() -> None:
    page = (DOCS / "handlers.md").read_text(encoding="utf-8")
    checked = []
    for name, written in re.findall(r"^#+ (\w+)\n`\1\(([^`]*)\)`", page, flags=re.MULTILINE):
        obj = getattr(handlers, name)
        if name not in SHOWN_BY_A_CALL and "options" not in inspect.signature(obj).parameters:  # they are passed on
            expected = signature_of(obj)
            assert re.sub(r', name="\w+"', "", " ".join(written.split())) == expected, (
                f"write `{name}({expected})` in docs/handlers.md"
            )
            checked.append(name)
    assert {"EMA", "EarlyStopping", "LRSchedule", "MetricLogger"} <= set(checked)
