"""The code of a task without the engine: of its file what training needs, as it is written there."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from ignite_engine.data.windows import Windows
from ignite_engine.rng import seed_everything
from ignite_engine.runs.fit import fit
from ignite_engine.sparse import RowwiseAdagrad, hash_ids
from ignite_engine.task import Task, TaskError

PARTS = (
    *("model", "loss_fn", "train_set", "parameter_groups", "weight_fn", "collate_fn", "optimizer", "schedule"),
    "schedule_per",
)
"""What a task, or a call of ``fit``, has of code that changes what is trained."""
COPIED = (hash_ids, RowwiseAdagrad)
"""Code of the engine that is copied: plain torch, which needs nothing else of the engine."""
WINDOWS = '''class Windows:
    """A sequence of names, and what opens the data of one."""

    def __init__(self, stream, open, **_):
        self.stream, self.open = stream, open'''
_POSITIONS: dict[Any, list[str]] = {
    Task: [one.name for one in fields(Task)],
    fit: list(inspect.signature(fit).parameters),
}
"""The names of the arguments of what makes a run."""
SEED = """def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)"""
_PACKAGES = ("ignite", "ignite_engine")


@dataclass
class Code:
    """Definitions, and the imports that they need."""

    text: str
    imports: set[str]
    """Lines, one for each name."""
    local: set[str] = field(default_factory=set)
    """Imports of modules in ``folder``."""
    folder: Path | None = None
    names: set[str] = field(default_factory=set)
    """What the definitions and the imports bind."""
    unused: list[str] = field(default_factory=list)
    """Names of the engine or Ignite that are mentioned and stand for nothing."""
    has_future: bool = False
    """Annotations are not evaluated."""
    has_handlers: bool = False
    """Handlers are given, which are left out."""


def code_of_task(build: Callable[..., Any]) -> Code:
    """What training needs of the file of ``build``, which then returns a dict of :data:`PARTS`.

    Args:
        build: returns a task, or what ``fit`` returns.

    Raises:
        TaskError: the code is not in a file, or cannot be taken out of it.
    """
    name, module = getattr(build, "__name__", ""), inspect.getmodule(build)
    path = None if module is None else getattr(module, "__file__", None)
    if module is None or path is None or not inspect.isfunction(build) or vars(module).get(name) is not build:
        raise TaskError(f"{name or type(build).__name__} is not a function at the top level of a file, as eject needs")
    source, has_handlers = _reduced(Path(path).read_text(encoding="utf-8"), module, name)
    code = _Taken(module, source, _root_of(module), [name]).code()
    code.has_handlers = has_handlers
    return code


def code_of(thing: Any) -> Code:
    """A function or class of the engine that needs nothing else of it."""
    module = inspect.getmodule(thing)
    assert module is not None and module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    return _Taken(module, source, None, [thing.__name__]).code()


def _root_of(module: ModuleType) -> Path:
    """The folder from which the module is imported by its name."""
    assert module.__file__ is not None
    dots = module.__name__.count(".") + (Path(module.__file__).name == "__init__.py")
    return Path(module.__file__).resolve().parents[dots]


def _is_of_engine(dotted: str) -> bool:
    return dotted.partition(".")[0] in _PACKAGES


def _modules_of(tree: ast.AST, package: str) -> Iterator[str]:
    """The modules that are imported anywhere in ``tree``, also those that may be names in a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    return (
        importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        if node.level
        else node.module or ""
    )


def _file_of(dotted: str, folder: Path) -> Path | None:
    place = folder.joinpath(*dotted.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _needs_engine(tree: ast.AST, folder: Path, seen: set[Path], package: str = "") -> bool:
    """Whether a file imports the engine or Ignite, itself or by a module beside it."""
    for dotted in _modules_of(tree, package):
        if _is_of_engine(dotted):
            return True
        path = _file_of(dotted, folder)
        if path is not None and path not in seen:
            seen.add(path)
            parent = dotted if path.name == "__init__.py" else dotted.rpartition(".")[0]
            if _needs_engine(ast.parse(path.read_text(encoding="utf-8")), folder, seen, parent):
                return True
    return False


def _reduced(source: str, module: ModuleType, build: str) -> tuple[str, bool]:
    """The file without what only other parts of a run need, and whether it gives handlers."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = {
        call: _POSITIONS.get(_value(call.func, module))
        for call in calls
        if isinstance(call.func, ast.Name | ast.Attribute)
    }
    has_handlers = False
    for call, names in sorted(made.items(), key=lambda pair: pair[0].lineno, reverse=True):
        if names is None:
            continue
        if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
            raise TaskError(f"line {call.lineno} of its file makes a run of * or **: name each argument for eject")
        given = dict(zip(names, call.args))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        has_handlers = has_handlers or "handlers" in given
        values = [name for name in ("optimizer", "schedule") if isinstance(given.get(name), ast.Constant | ast.Dict)]
        kept = [name for name in PARTS if name in given and name not in values]  # the values are those of the config
        indent = " " * (_indent(source, call.lineno) + 4)
        lines = [f"{indent}{name}={ast.get_source_segment(source, given[name])}," for name in kept]
        source = _replaced(source, call, "\n".join(["dict(", *lines, f"{indent[4:]})"]))
    for function in _functions(source):
        if function.returns is not None and _value(function.returns, module) is Task:
            source = _replaced(source, function.returns, "dict")
    while (statement := _idle(source, module, build)) is not None:
        source = _replaced(source, statement, "", whole_lines=True)
    return source, has_handlers


def _functions(source: str) -> list[ast.FunctionDef]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return sorted(functions, key=lambda function: function.lineno, reverse=True)


def _value(node: ast.AST, module: ModuleType) -> Any:
    """What a name, or an attribute of one, is at the top level of ``module``."""
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, module), node.attr, None)
    return vars(module).get(node.id) if isinstance(node, ast.Name) else None


def _indent(source: str, line: int) -> int:
    text = source.splitlines()[line - 1]
    return len(text) - len(text.lstrip())


def _replaced(source: str, node: Any, text: str, *, whole_lines: bool = False) -> str:
    lines = source.encode().splitlines(keepends=True)
    before, after = b"".join(lines[: node.lineno - 1]), b"".join(lines[node.end_lineno :])
    if not whole_lines:
        before += lines[node.lineno - 1][: node.col_offset]
        after = lines[node.end_lineno - 1][node.end_col_offset :] + after
    return (before + text.encode() + after).decode()


def _idle(source: str, module: ModuleType, build: str) -> ast.stmt | None:
    """An assignment of ``build`` that nothing reads any more, and that needs the engine or Ignite."""
    tree = ast.parse(source)
    of_engine = _names_of_engine(tree, module)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == build)
    for statement in function.body:
        if isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets):
            names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            others = set().union(*(_names(other) for other in function.body if other is not statement))
            if not names & others and _names(statement.value) & of_engine:
                return statement
    return None


def _names_of_engine(tree: ast.Module, module: ModuleType) -> set[str]:
    """Names at the top level that are of the engine or Ignite, or are defined by means of such."""
    package = module.__package__ or ""
    found = {name for statement in tree.body for name, line in _imported(statement, package) if _is_of_engine(line[1])}
    while (
        more := {
            name
            for statement in tree.body
            if not isinstance(statement, ast.Import | ast.ImportFrom) and _names(statement) & found
            for name in _bound(statement)
        }
        - found
    ):
        found |= more
    return found


def _names(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _imported(statement: ast.stmt, package: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """The names that an import binds, each with its line and the module that it is of."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            as_name = f" as {alias.asname}" if alias.asname else ""
            yield alias.asname or alias.name.partition(".")[0], (f"import {alias.name}{as_name}", alias.name)
    elif isinstance(statement, ast.ImportFrom):
        base = _absolute(statement, package)
        if statement.names[0].name == "*":
            raise TaskError(
                f"line {statement.lineno} of its file imports * from {base}: name what it imports for eject"
            )
        for alias in statement.names:
            as_name = f" as {alias.asname}" if alias.asname else ""
            yield alias.asname or alias.name, (f"from {base} import {alias.name}{as_name}", base)


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement at the top level binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    stored = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            stored.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            stored |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return stored


class _Taken:
    """What is reached in a file from some of its names."""

    def __init__(self, module: ModuleType, source: str, folder: Path | None, roots: Iterable[str]) -> None:
        self._module, self._source, self._folder = module, source, folder
        self._package = module.__package__ or ""
        self._body = [statement for statement in ast.parse(source).body if not _is_left_out(statement)]
        self._imports = {name: line for statement in self._body for name, line in _imported(statement, self._package)}
        own = set().union(*map(_bound, self._body)) - self._imports.keys()
        # settings of other packages, and nothing that uses what is defined here
        self._kept: set[ast.stmt] = {one for one in self._body if isinstance(one, ast.Expr) and not _names(one) & own}
        self._reached: set[str] = set()
        for statement in list(self._kept):
            self._reach(_names(statement))
        self._reach(roots)

    def _reach(self, names: Iterable[str]) -> None:
        for name in set(names) - self._reached:
            self._reached.add(name)
            for statement in self._body:
                is_import = isinstance(statement, ast.Import | ast.ImportFrom)
                if not is_import and statement not in self._kept and name in _bound(statement):
                    self._kept.add(statement)
                    self._reach(_names(statement))

    def code(self) -> Code:
        code = Code("", set(), folder=None)
        prefixes: list[str] = []
        for name in sorted(self._reached & self._imports.keys()):
            line, module = self._imports[name]
            code.names.add(name)
            if module == "__future__":
                continue
            if _is_of_engine(module):
                prefix = self._of_engine(name, code)
                prefixes += [prefix] if prefix else []
            elif self._folder is not None and (path := _file_of(module, self._folder)) is not None:
                self._check_beside(module, path)
                code.local.add(line)
                code.folder = self._folder
            else:
                code.imports.add(line)
        code.has_future = any(module == "__future__" for _, module in self._imports.values())
        for statement in self._kept:
            code.names |= _bound(statement) if not isinstance(statement, ast.Expr) else set()
            if any(_is_of_engine(dotted) for dotted in _modules_of(statement, self._package)):
                raise TaskError(f"line {statement.lineno} imports the engine within a definition that training needs")
        if "__file__" in self._reached:
            prefixes.append(f"__file__ = {self._module.__file__!r}  # files beside it are read")
        code.text = "\n\n\n".join([*prefixes, self._text()])
        return code

    def _of_engine(self, name: str, code: Code) -> str | None:
        """What stands for a name of the engine or Ignite; None: it is in ``code.unused``."""
        value = vars(self._module).get(name)
        if value is Windows:
            return WINDOWS
        if value is seed_everything and name == value.__name__:
            code.imports |= {"import random", "import numpy as np", "import torch"}
            return SEED
        if value in COPIED and value.__name__ == name:
            copied = code_of(value)
            code.imports |= copied.imports
            code.names |= copied.names
            return copied.text
        code.unused.append(name)
        return None

    def _check_beside(self, dotted: str, path: Path) -> None:
        assert self._folder is not None
        package = dotted.rpartition(".")[0]
        if _needs_engine(ast.parse(path.read_text(encoding="utf-8")), self._folder, {path}, package):
            raise TaskError(
                f"{path.name}, which its file imports, imports ignite_engine or Ignite, so eject cannot keep it"
            )

    def _text(self) -> str:
        """The statements that are kept, in their order, with the comments above them."""
        lines = self._source.splitlines()
        text, last, was_block = "", 0, False
        for statement in sorted(self._kept, key=lambda statement: statement.lineno):
            decorators = getattr(statement, "decorator_list", [])
            first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
            while first > last + 1 and lines[first - 2].startswith("#"):
                first -= 1
            assert statement.end_lineno is not None
            is_block = isinstance(statement, ast.FunctionDef | ast.ClassDef)
            gap = "\n\n\n" if is_block or was_block else "\n" if first == last + 1 else "\n\n"
            text += (gap if last else "") + "\n".join(lines[first - 1 : statement.end_lineno])
            last, was_block = statement.end_lineno, is_block
        return text


def _is_left_out(statement: ast.stmt) -> bool:
    """A text between the statements, or what only a program of its own does."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.If) and "__name__" in _names(statement.test)
