"""The table in docs/architecture.md: what its figures count, and that they are of these sources."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    path = ROOT / "docs" / "tools" / "house.py"
    spec = importlib.util.spec_from_file_location("house", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # it measures runs, and changes with any line
def test_table_is_of_these_sources(house: ModuleType) -> None:
    written = house.written_table(house.PAGE.read_text(encoding="utf-8"))
    if written != house.table():
        pytest.fail("The table in docs/architecture.md is stale: run make house", pytrace=False)


def test_lines_of_code_are_without_blank_lines_comments_and_docstrings(house: ModuleType, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    text = '"""A\nmodule."""\n\n# a comment\nx = """a\nstring"""  # and code\n'
    function = '\n\ndef f():\n    "f"\n    return (\n        x\n    )\n'
    module.write_text(text + function)

    assert house.code_lines(module) == 2 + 4


def test_mutable_fields_are_what_methods_assign_on_self(house: ModuleType, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "@dataclass(frozen=True)\nclass Frozen:\n    a: int\n\n"
        "@dataclass\nclass Data:\n    a: int\n    b: bool\n\n"
        "class Plain:\n    def __init__(self):\n        self.a, self.b = 1, True\n"
        "    def change(self):\n        self.c: int = 1\n        self.a += 1\n        other.d = 1\n"
    )
    house.MODULES["module"] = module

    assert house.mutable_fields([("module", "Frozen")]) == (0, 0, 0)
    assert house.mutable_fields([("module", "Data")]) == (2, 1, 2)
    assert house.mutable_fields([("module", "Plain")]) == (3, 1, 2)
    del house.MODULES["module"]


def test_circle_is_counted_once(house: ModuleType) -> None:
    assert house.circles([("a", "b"), ("b", "c")]) == 0
    assert house.circles([("a", "b"), ("b", "c"), ("c", "a"), ("d", "e"), ("e", "d")]) == 2


def test_calls_are_of_our_own_files(house: ModuleType) -> None:
    from ignite_engine.errors import is_whole

    calls = house.Calls()
    calls.start()
    is_whole(3)
    is_whole(4)
    len(house.room_of("ignite_engine.data.loader"))
    calls.stop()

    assert calls.figures() == (2, 1)
