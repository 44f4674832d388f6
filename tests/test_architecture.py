"""Who may import whom, held over the AST: the core knows no handler, and no handler knows another."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "ignite_engine"
HANDLERS = ROOT / "handlers"

# Modules (and everything below a package) that work without a trainer, so in any Ignite engine or hand-written loop.
TRAINER_FREE = {"events", "state", "precision", "accumulation", "agreement", "rng", "checkpointing"}
TRAINER_FREE |= {"data", "data_source", "environment", "sampling"}
# `recipe` uses everything, and only the command line uses the recipe.
RECIPE_USERS = {"recipe", "recipe_parts", "cli", "__main__"}
# The shared part of all sinks: a base to write to, not a handler that acts.
SHARED_HANDLER_MODULES = {"sinks"}
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


def imports(path: Path, *, at_import_time: bool = False) -> Iterator[tuple[str, int]]:
    """``read_imports`` for a file of this repository."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return read_imports(path, package, at_import_time=at_import_time)


def read_imports(path: Path, package: str, *, at_import_time: bool = False) -> Iterator[tuple[str, int]]:
    """The absolute dotted names that a file imports, each with its line; of ``from a import b`` both a and a.b.

    Args:
        package: what its relative imports start from.
        at_import_time: leave out what stands in a function or under ``if TYPE_CHECKING``.
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
    for child in ast.iter_child_nodes(tree):
        if at_import_time and (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            continue
        if at_import_time and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _nodes(child, at_import_time)


def _imports_by_name(call: ast.Call) -> bool:
    return bool(call.args) and ast.unparse(call.func) in {"importlib.import_module", "import_module", "__import__"}


def ours(path: Path) -> Iterator[tuple[str, str, int]]:
    """Imports of our own modules: ("handlers" | core module | "" for the package itself, dotted rest, line)."""
    for name, line in imports(path):
        if name == "ignite_engine" or name.startswith("ignite_engine."):
            first, _, rest = name.removeprefix("ignite_engine").removeprefix(".").partition(".")
            yield first, rest, line


def breaches(paths: Iterable[Path], is_breach: Callable[[str, str], bool]) -> list[str]:
    """``file:line`` of each import of ours for which ``is_breach(first, rest)``."""
    return [f"{path.relative_to(ROOT)}:{line}" for path in paths for *name, line in ours(path) if is_breach(*name)]


def core_module(path: Path) -> str:
    """The first name below ``ignite_engine``: the module, or the package that the file lies in."""
    return path.relative_to(CORE).with_suffix("").parts[0]


def is_config(module: str) -> bool:
    """config.py and its parts (config_file.py, ...), the only modules made of pydantic classes."""
    return module.split("_")[0] == "config"


def reached_from(module: str) -> set[str]:
    """The core modules that importing ``module`` leads to, itself included."""
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        waiting += [first for path in CORE_FILES if core_module(path) == name for first, _, _ in ours(path) if first]
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


def test_core_imports_no_handler_but_in_the_recipe() -> None:
    core = [path for path in CORE_FILES if core_module(path) != "recipe"]

    assert breaches(core, lambda first, rest: first == "handlers") == []


@pytest.mark.parametrize("module", sorted(TRAINER_FREE))
def test_module_works_without_a_trainer(module: str) -> None:
    """Neither it nor anything it leads to imports the trainer, the update, or a name of the package's root."""
    known = {core_module(path) for path in CORE_FILES} | {"checkpointing"}
    # `from ignite_engine import Trainer` shows as the first name "Trainer", which is no module of ours
    assert reached_from(module) - known == set()
    assert reached_from(module) & {"trainer", "update"} == set()


def test_update_leads_to_no_trainer() -> None:
    assert reached_from("update") & {"trainer", "Trainer"} == set()
    assert {"precision", "accumulation"} <= reached_from("trainer") | reached_from("update")


def test_checkpoint_store_knows_no_event() -> None:
    store = [path for path in CORE_FILES if core_module(path) == "checkpointing"]

    assert "events" not in reached_from("checkpointing")
    assert [str(path) for path in store for name, _ in imports(path) if name.startswith("ignite.engine")] == []


@pytest.mark.parametrize("path", HANDLER_FILES, ids=lambda path: path.name)
def test_handler_imports_no_other_handler(path: Path) -> None:
    if path.name == "__init__.py":
        return  # it names them all
    own = {module_name(path).removeprefix("ignite_engine.handlers."), *SHARED_HANDLER_MODULES}

    def is_breach(first: str, rest: str) -> bool:
        return first == "handlers" and rest != "" and rest.split(".")[0] not in own

    assert breaches([path], is_breach) == []


def test_only_the_command_line_imports_config_and_recipe() -> None:
    below = [path for path in CORE_FILES if core_module(path) not in RECIPE_USERS] + HANDLER_FILES
    no_config = [path for path in below if path in HANDLER_FILES or not is_config(core_module(path))]

    assert breaches(below, lambda first, rest: first.startswith("recipe")) == []
    assert breaches(no_config, lambda first, rest: is_config(first)) == []


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
        allowed = {"pydantic"} if is_config(path.stem) else set()
        return (name.split(".")[0] in HEAVY - allowed) or name.startswith("torch.utils.tensorboard")

    eager = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for name, line in imports(path, at_import_time=True)
        if is_heavy(name, path)
    ]

    assert eager == []


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
