"""Who may import whom: the core knows no handler and nothing of ``ext/``, and no handler knows another."""

import ast
import gc
import re
import subprocess
import sys
from collections import defaultdict
from configparser import ConfigParser
from functools import cache
from pathlib import Path

import pytest
from ignite.engine import Engine
from ignite.metrics import Metric

ROOT = Path(__file__).resolve().parent.parent
HANDLERS = ROOT / "handlers"

# What only composes the other rooms: it may import everything, and nothing but itself may import it.
ON_TOP = {"handlers", "runs", "cli", "__main__"}
# Parts that several handlers share.
SHARED_HANDLER_MODULES = {"never_stepped", "console", "followed_metric", "log", "meters", "metric_values"}
# Imported only inside the function that needs them.
HEAVY = {"clearml", "tensorboard", "matplotlib"}


def module_name(path):
    """The dotted name a file is imported by, e.g. ``ignite_engine.handlers.log``."""
    if path.is_relative_to(HANDLERS):
        parts = ("ignite_engine", "handlers", *path.relative_to(HANDLERS).with_suffix("").parts)
    else:
        parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def files_of(folder):
    # rglob does not follow the symlink ignite_engine/handlers, so each file is seen once
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


HANDLER_FILES = files_of(HANDLERS)
SOURCES = files_of(ROOT / "ignite_engine") + HANDLER_FILES


@pytest.fixture(autouse=True, scope="module")
def no_collection():
    """Else all trees would be looked through again and again while they grow."""
    gc.disable()
    yield
    gc.enable()


@cache
def tree_of(path):
    return ast.parse(path.read_text(), str(path))


@cache
def imports(path, *, at_import_time=False):
    """The absolute dotted names that a file imports, each with its line; of ``from a import b`` both a and a.b.

    Args:
        path: a file of this repository.
        at_import_time: leave out what is in a function or under ``if TYPE_CHECKING``.
    """
    module = module_name(path)
    parents = (module if path.name == "__init__.py" else module.rpartition(".")[0]).split(".")
    found = []
    for node in _nodes(tree_of(path), at_import_time):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base != "ignite_engine":  # `from ignite_engine import events` is about events
                found.append((base, node.lineno))
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Call) and _imports_by_name(node) and isinstance(node.args[0], ast.Constant):
            found.append((str(node.args[0].value), node.lineno))
    return found


def _imports_by_name(call):
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    return bool(call.args) and name in ("import_module", "__import__")


def _nodes(tree, at_import_time):
    waiting = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if at_import_time and (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
                continue
            if at_import_time and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            yield child
            waiting.append(child)


def room_of(module):
    """The package or module right below ``ignite_engine``, or ``ext/NAME``; ``""`` for the package itself."""
    parts = module.split(".")[1:]
    return "/".join(parts[: 2 if parts[:1] == ["ext"] else 1])


@cache
def home_of_public_names():
    """The room of each name of ``ignite_engine/__init__``."""
    tree = ast.parse((ROOT / "ignite_engine" / "__init__.py").read_text())
    return {
        alias.name: room_of(str(node.module))
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def rooms_imported_by(path):
    """The other rooms that a file imports, a public name of the package counting as its home."""
    for name, line in imports(path):
        if name.startswith("ignite_engine."):
            room = home_of_public_names().get(room_of(name), room_of(name))
            if room not in ("", "ext", room_of(module_name(path))) and not room.startswith("__"):
                yield room, line


@cache
def arrows():
    """For each room the rooms that it imports, each with one ``file:line``; annotations count."""
    found = defaultdict(dict)
    for path in SOURCES:
        if room := room_of(module_name(path)):
            for other, line in rooms_imported_by(path):
                found[room].setdefault(other, f"{path.relative_to(ROOT)}:{line}")
    return found


def breaches(is_breach):
    """``room -> other, file:line`` of each arrow that must not be."""
    return [
        f"{room} -> {other}, {where}"
        for room, others in sorted(arrows().items())
        for other, where in others.items()
        if is_breach(room, other)
    ]


def test_no_circle_of_rooms():
    reached = {}
    leads_to = {room: set(others) for room, others in arrows().items()}
    for room in leads_to:
        reached[room], waiting = set(), [room]
        while waiting:
            new = leads_to.get(waiting.pop(), set()) - reached[room]
            reached[room] |= new
            waiting += new

    circles = {room: sorted(o for o in others if room in reached.get(o, ())) for room, others in reached.items()}
    assert {room: others for room, others in circles.items() if others} == {}, "move what both need into a third room"


def test_core_knows_no_handler_config_or_recipe():
    def is_breach(room, other):
        return room not in ON_TOP and not room.startswith("ext/") and other in ON_TOP

    assert breaches(is_breach) == [], "let them meet on the bus: an event, or a value in state.metrics"


def test_core_does_not_import_ext():
    """What ``ext/`` adds is named in a table by its module and name, so that it can be deleted."""

    def is_breach(room, other):
        return other.startswith("ext/") and not room.startswith("ext/")

    assert breaches(is_breach) == [], "reach it through an event, register(), or a table of names"


def test_the_package_can_be_overlooked():
    package = ROOT / "ignite_engine"
    entries = {path.name for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}

    assert len(entries) <= 20, "put it into the room that it belongs to"


def test_few_private_names_of_ignite():
    private = {name for kind in (Engine(print), Metric) for name in dir(kind) if re.match("_[a-z]", name)}
    named = {
        getattr(node, "attr", getattr(node, "name", None))
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute | ast.FunctionDef)
    }

    assert len(found := private & named) <= 8, f"use what Ignite documents: {sorted(found)}"


def kinds_named_in(path):
    """``line: expression`` of each use of torch's modules for devices, generic ones too, and of each kind's name."""
    kinds = {"cuda", "mps", "xpu", "cudnn"}
    modules = kinds | {"accelerator", "get_device_module"}
    if not re.search("|".join(modules), path.read_text()):
        return
    for node in ast.walk(tree_of(path)):
        of_torch = isinstance(node, ast.Attribute) and node.attr in modules and "torch" in ast.unparse(node.value)
        if of_torch or (isinstance(node, ast.Constant) and node.value in kinds):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_one_module_names_kinds_of_devices():
    named = {str(path.relative_to(ROOT)): found for path in SOURCES if (found := list(kinds_named_in(path)))}

    assert len(named.pop("ignite_engine/devices.py")) > 3
    assert named == {}, "ask ignite_engine/devices.py, so that it works on every kind"


def test_checkpoint_store_knows_no_ignite():
    store = sorted((ROOT / "ignite_engine" / "checkpoint").glob("*.py"))

    assert store
    assert [str(path) for path in store for name, _ in imports(path) if name.split(".")[0] == "ignite"] == []


def test_handler_imports_no_other_handler():
    found = []
    for path in HANDLER_FILES:
        if path != HANDLERS / "__init__.py":  # it names them all
            own = {module_name(path).split(".")[2], *SHARED_HANDLER_MODULES}
            for name, line in imports(path):
                if name.startswith("ignite_engine.handlers.") and name.split(".")[2] not in own:
                    found.append(f"{path.relative_to(ROOT)}:{line} {name}")

    assert found == [], "let the two meet on the bus, or move what they share into a module of SHARED_HANDLER_MODULES"


@pytest.mark.parametrize("folder", ["ignite_engine", "handlers", "examples", "benchmarks", "tests"])
def test_bare_name_handlers_is_never_imported(folder):
    """A user's own ``handlers.py`` would shadow it."""
    bare = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files_of(ROOT / folder)
        if re.search(r"(?<!\.)\bhandlers\b", path.read_text())  # most of the time would be parsing
        for name, line in imports(path)
        if name == "handlers" or name.startswith("handlers.")
    ]

    assert bare == []


def test_heavy_packages_are_imported_where_they_are_used():
    def is_heavy(name):
        return name.split(".")[0] in HEAVY or name.startswith("torch.utils.tensorboard")

    eager = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for name, line in imports(path, at_import_time=True)
        if is_heavy(name)
    ]

    assert eager == [], f"import {', '.join(sorted(HEAVY))} within the function that needs it"


@pytest.mark.nightly
def test_importing_the_package_and_the_handlers_stays_light():
    """A fresh interpreter: what is in ``sys.modules`` after the import beyond what torch and ignite brought."""
    script = f"""
import sys, torch, ignite.engine, ignite.handlers, ignite.metrics, ignite.distributed
before = set(sys.modules)
import ignite_engine
assert "ignite_engine.handlers" not in sys.modules, "the package imports its handlers"
import ignite_engine.handlers
print(*sorted({HEAVY!r} & {{name.split(".")[0] for name in set(sys.modules) - before}}))
late = ("ignite_engine.runs.config", "ignite_engine.runs.recipe")
print(*sorted(name for name in sys.modules if name.startswith(late)))
"""

    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_every_package_is_in_the_wheel():
    """Those that setup.cfg lists are the folders that are there."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    core = (path for path in (ROOT / "ignite_engine").rglob("__init__.py") if "handlers" not in path.parts)
    found = {path.parent.relative_to(ROOT) for path in core}
    found |= {"ignite_engine" / path.parent.relative_to(ROOT) for path in HANDLERS.rglob("__init__.py")}
    listed = set(setup["options"]["packages"].split())
    if not (ROOT / "ignite_engine" / "ext").exists():
        listed = {name for name in listed if not name.startswith("ignite_engine.ext")}
    assert listed == {".".join(path.parts) for path in found}
