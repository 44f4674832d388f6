"""Who may import whom, held over the AST: the core knows no handler, and no handler knows another."""

from __future__ import annotations

import ast
import importlib
import operator
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "ignite_engine"
HANDLERS = ROOT / "handlers"

TABLE = ROOT / "docs" / "architecture.md"
TOP_FOLDERS = {".ci", "benchmarks", "configs", "docs", "examples", "handlers", "ignite_engine", "tests"}
# Parts that several handlers share.
SHARED_HANDLER_MODULES = {
    *("history", "sinks", "columns", "media", "meters", "followed_metric", "host_memory", "metric_values", "glyphs"),
    *("compilations", "built_schedule", "comparable"),
}
# Imported only inside the function that needs them.
HEAVY = {"clearml", "tensorboard", "matplotlib", "pydantic"}


def module_name(path: Path) -> str:
    """The dotted name a file is imported by, e.g. ``ignite_engine.handlers.sinks``."""
    if path.is_relative_to(HANDLERS):
        parts = ("ignite_engine", "handlers", *path.relative_to(HANDLERS).with_suffix("").parts)
    else:
        parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def files_of(folder: Path) -> list[Path]:
    # rglob does not follow the symlink ignite_engine/handlers, so each file is seen once
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


CORE_FILES = [path for path in files_of(CORE) if "handlers" not in path.relative_to(CORE).parts]
HANDLER_FILES = files_of(HANDLERS)
SOURCES = CORE_FILES + HANDLER_FILES


@cache
def imports(path: Path, *, at_import_time: bool = False) -> list[tuple[str, int]]:
    """``read_imports`` for a file of this repository."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return [*read_imports(path, package, at_import_time=at_import_time)]


def read_imports(path: Path, package: str, *, at_import_time: bool = False) -> Iterator[tuple[str, int]]:
    """The absolute dotted names that a file imports, each with its line; of ``from a import b`` both a and a.b.

    Args:
        package: what its relative imports start from.
        at_import_time: leave out what is in a function or under ``if TYPE_CHECKING``.
    """
    parents = package.split(".")
    for node in _nodes(ast.parse(path.read_text(), str(path)), at_import_time):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base != "ignite_engine":  # `from ignite_engine import events` is about events
                yield base, node.lineno
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and _imports_by_name(node) and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value), node.lineno


def _nodes(tree: ast.AST, at_import_time: bool) -> Iterator[ast.AST]:
    waiting = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if at_import_time and (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
                continue
            if at_import_time and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            yield child
            waiting.append(child)


def _imports_by_name(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    return bool(call.args) and name in ("import_module", "__import__")


def ours(path: Path) -> Iterator[tuple[str, str, int]]:
    """Imports of our own modules: ("handlers" | core module | "" for the package itself, dotted rest, line)."""
    for name, line in imports(path):
        if name == "ignite_engine" or name.startswith("ignite_engine."):
            first, _, rest = name.removeprefix("ignite_engine").removeprefix(".").partition(".")
            yield first, rest, line


def breaches(paths: Iterable[Path], is_breach: Callable[[str, str], bool]) -> list[str]:
    """``file:line`` of each import of ours for which ``is_breach(first, rest)``."""
    return [f"{path.relative_to(ROOT)}:{line}" for path in paths for *name, line in ours(path) if is_breach(*name)]


def room_of(path: Path) -> str:
    """The package or top-level module of ``ignite_engine`` that a file belongs to; ``""`` for ``__init__``."""
    module = module_name(path).removeprefix("ignite_engine").removeprefix(".")
    return module.split(".")[0]


def table_of_rooms() -> dict[str, set[str]]:
    """What each room may import, as ``docs/architecture.md`` says it."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {room: set(re.findall(r"`(\w+)`", allowed)) for room, allowed in rows}


@cache
def home_of_public_names() -> dict[str, str]:
    """The room of each name of ``ignite_engine/__init__``."""
    tree = ast.parse((CORE / "__init__.py").read_text())
    return {
        alias.name: str(node.module).removeprefix("ignite_engine.").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def rooms_imported_by(path: Path) -> Iterator[tuple[str, int]]:
    """The other rooms that a file imports, a public name of the package counting as its home."""
    home = home_of_public_names()
    for first, _, line in ours(path):
        room = home.get(first, first)
        if room not in ("", room_of(path)) and not room.startswith("__"):
            yield room, line


def reached_from(room: str) -> set[str]:
    """The rooms that the table lets a room lead to."""
    table, reached, waiting = table_of_rooms(), set[str](), [room]
    while waiting:
        for each in table[waiting.pop()] - reached:
            reached.add(each)
            waiting.append(each)
    return reached


def test_reader_sees_every_form_of_import(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "import a.b as c\nfrom d import e\ndef f():\n    import g\nimport importlib\nimportlib.import_module('h')\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import i\n"
        "try:\n    import j\nexcept ImportError: ...\n"
    )
    names = {name for name, _ in read_imports(source, "ignite_engine.handlers")}
    eager = {name for name, _ in read_imports(source, "ignite_engine.handlers", at_import_time=True)}
    relative = tmp_path / "relative.py"
    relative.write_text("from . import sinks\nfrom .memory import MemoryLogger\nfrom ..trainer import Trainer\n")

    assert {"a.b", "d", "d.e", "g", "h", "i", "j"} <= names
    assert {"a.b", "d", "d.e", "h", "j"} <= eager and not {"g", "i"} & eager
    assert {name for name, _ in read_imports(relative, "ignite_engine.handlers")} >= {
        "ignite_engine.handlers.sinks",
        "ignite_engine.handlers.memory",
        "ignite_engine.trainer",
    }


def test_the_sources_are_found_and_each_is_seen_once() -> None:
    names = [module_name(path) for path in SOURCES]

    assert {"ignite_engine", "ignite_engine.trainer", "ignite_engine.handlers"} <= set(names)
    assert len(names) == len(set(names))


def test_table_names_every_room_once() -> None:
    rooms = {room_of(path) for path in SOURCES} - {"", "__main__"}

    assert set(table_of_rooms()) == rooms, "each package and module of ignite_engine/ has a row in docs/architecture.md"


@pytest.mark.parametrize("room", sorted(table_of_rooms()))
def test_room_imports_what_the_table_says(room: str) -> None:
    files = [path for path in SOURCES if room_of(path) == room]
    imported = [(each, path, line) for path in files for each, line in rooms_imported_by(path)]
    allowed = table_of_rooms()[room]

    forbidden = [f"{path.relative_to(ROOT)}:{line} {each}" for each, path, line in imported if each not in allowed]
    needless = allowed - {each for each, _, _ in imported}
    row = f"the row of `{room}` in docs/architecture.md"
    assert forbidden == [], f"not in {row}: move the code to a room that may import it, or add the room to the row"
    assert needless == set(), f"nothing imports them: take them out of {row}"
    assert room not in reached_from(room), f"{row} makes a circle of rooms: move what both need into a third one"


def named_on_pages() -> list[str]:
    """Each ``module.py::name`` of the pages on architecture and loop; the core's without ``ignite_engine/``."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (TABLE, TABLE.with_name("the_loop.md")))
    return sorted(set(re.findall(r"`((?!tests/)[\w/]+\.py::[\w.]+)`", pages)))


@pytest.mark.parametrize("named", named_on_pages())
def test_module_and_name_on_a_page_exist(named: str) -> None:
    path, name = named.split("::")
    module = importlib.import_module(f"ignite_engine.{path.removesuffix('.py').replace('/', '.')}")

    assert (CORE / path).is_file()
    assert operator.attrgetter(name)(module) is not None


def test_every_step_on_the_page_names_a_module_or_an_event() -> None:
    steps = re.findall(r"^\d\. ((?:.+\n)(?:   .+\n)*)", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert len(steps) > 30
    assert [step for step in steps if not re.search(r"\.py::|`[A-Z]+_[A-Z_]+`|`state\.\w+`", step)] == []


def test_nothing_that_a_run_wrote_is_kept_at_the_top() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    folders = {name.split("/")[0] for name in tracked.splitlines() if "/" in name}
    assert folders == TOP_FOLDERS, (
        "git rm what a run wrote, and ignore it in git; add a new folder of the project to TOP_FOLDERS, with a line "
        "under 'Where things are' in CONTRIBUTING.md"
    )


def test_core_knows_no_handler_config_or_recipe() -> None:
    for room in set(table_of_rooms()) - {"handlers", "runs", "replay", "cli"}:
        assert not reached_from(room) & {"handlers", "runs", "replay", "cli", "config"}, room
    assert not reached_from("handlers") & {"runs", "replay", "cli", "config"}


def kinds_named_in(path: Path) -> Iterator[str]:
    """``line: expression`` of each use of torch's modules for devices, generic ones too, and of each kind's name."""
    kinds = {"cuda", "mps", "xpu", "cudnn"}
    modules = kinds | {"accelerator", "get_device_module"}
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        of_torch = isinstance(node, ast.Attribute) and node.attr in modules and "torch" in ast.unparse(node.value)
        if of_torch or (isinstance(node, ast.Constant) and node.value in kinds):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_one_module_names_kinds_of_devices() -> None:
    named = {path.relative_to(ROOT): found for path in SOURCES if (found := list(kinds_named_in(path)))}

    assert len(named.pop(Path("ignite_engine/devices.py"))) > 3
    assert named == {}, "ask ignite_engine/devices.py, so that it works on every kind"


def test_checkpoint_store_knows_no_ignite() -> None:
    store = [path for path in CORE_FILES if room_of(path) == "checkpointing"]

    assert [str(path) for path in store for name, _ in imports(path) if name.split(".")[0] == "ignite"] == []


@pytest.mark.parametrize("path", HANDLER_FILES, ids=module_name)
def test_handler_imports_no_other_handler(path: Path) -> None:
    if path == HANDLERS / "__init__.py":
        return  # it names them all
    own = {module_name(path).split(".")[2], *SHARED_HANDLER_MODULES}

    def is_breach(first: str, rest: str) -> bool:
        return first == "handlers" and rest != "" and rest.split(".")[0] not in own

    assert breaches([path], is_breach) == [], (
        "let the two meet on the bus (an event, or a value in state.metrics), or move what several handlers share into "
        "a module of SHARED_HANDLER_MODULES"
    )


@pytest.mark.parametrize("folder", ["ignite_engine", "handlers", "examples", "benchmarks", "tests"])
def test_bare_name_handlers_is_never_imported(folder: str) -> None:
    """A user's own ``handlers.py`` would shadow it."""
    bare = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files_of(ROOT / folder)
        for name, line in imports(path)
        if name == "handlers" or name.startswith("handlers.")
    ]

    assert bare == []


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    def is_heavy(name: str, path: Path) -> bool:
        # the next test shows that these are imported only when used
        allowed = {"pydantic"} if room_of(path) == "config" else set()
        return (name.split(".")[0] in HEAVY - allowed) or name.startswith("torch.utils.tensorboard")

    eager = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for name, line in imports(path, at_import_time=True)
        if is_heavy(name, path)
    ]

    assert eager == [], f"import {', '.join(sorted(HEAVY))} within the function that needs it"


def test_importing_the_package_and_the_handlers_stays_light() -> None:
    """A fresh interpreter: what is in ``sys.modules`` after the import beyond what torch and ignite brought."""
    script = f"""
import sys, torch, ignite.engine, ignite.handlers, ignite.metrics, ignite.distributed
before = set(sys.modules)
import ignite_engine
assert "ignite_engine.handlers" not in sys.modules, "the package imports its handlers"
import ignite_engine.handlers
print(*sorted({HEAVY!r} & {{name.split(".")[0] for name in set(sys.modules) - before}}))
print(*sorted(name for name in sys.modules if name.startswith(("ignite_engine.config", "ignite_engine.runs.recipe"))))
"""

    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
