"""Measures the size and the coupling of the engine, and keeps the table in docs/architecture.md.

    python docs/tools/house.py [--check]

Writes the table between its two markers; ``--check`` writes nothing and fails where the table is stale. All figures are
counts, the same in every run on the same versions of Python and torch. The definitions are the constants below.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import functools
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import traceback
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- house: written by `make house` -->"
END = "<!-- house: end -->"


class Feature(NamedTuple):
    """A feature that most users do not need.

    A file knows of it if one of its identifiers matches ``names``, or if it imports a module of the feature's own.
    """

    names: str
    own_files: tuple[str, ...]


FEATURES = {
    "sharding": Feature(r"(?i)shard|dtensor|full_tensor|placements", ("*shard*",)),
    "windows": Feature(r"(?i)windows?($|_|ed|s)|WINDOW_", ("*window*",)),
    "row and delta files": Feature(
        r"(?i)(changed|delta|stored)_?rows|rows_?(file|of_parts|ofparts)|has_rows|_chain",
        ("*/checkpointing/*row*", "*/checkpointing/*delta*"),
    ),
    "rank invariance": Feature(
        r"(?i)rank_?invariant|^_?invariant|_invariant|InvariantSums|global_micro_batches",
        ("*invariant*", "*gradient_tree*", "*tree_sum*"),
    ),
    "non-finite policy": Feature(
        r"(?i)non_?finite|not_?finite|roll_?back|load_healthy", ("*non_finite*", "*roll*back*")
    ),
    "padding of uneven ranks": Feature(
        r"(?i)padd(ed|ing)|uneven|^_?(until_)?exhausted$|without_trace|idle",
        ("*without_trace*", "*lookahead*", "*uneven*"),
    ),
    "read errors": Feature(r"(?i)^(max)?_?read_?errors?$", ("*read_error*",)),
}

# Classes whose fields are counted, if a run makes an instance of them: by the files in which they are defined.
STATEFUL_FILES = ("*/trainer.py", "*/engine/*", "*/data/*", "*/states/resume_state.py")
STATELESS_FILES = ("*/data/sampler.py", "*/data/seeding.py")  # these compute the order and the seeds of samples

# The tiny run whose calls are counted: nothing is logged or saved in its quiet iteration, and the first 64 samples, in
# which it is watched whether a sample draws random numbers, are behind.
LOG_EVERY, SAVE_EVERY, QUIET_ITERATION, STOP_AT, LAST_ITERATION = 5, 7, 19, 3, 23

LONG = 250  # lines of a module, blank ones and comments included


# -- the files --------------------------------------------------------------------------------------------------------


def source_files() -> list[Path]:
    """The engine's modules; ``rglob`` does not follow the symlink ignite_engine/handlers, so each is here once."""
    files = [path for folder in ("ignite_engine", "handlers") for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in files if "handlers" not in path.relative_to(ROOT).parts[1:2])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("ignite_engine", *parts) if parts[0] == "handlers" else parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in source_files()}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def code_lines(path: Path) -> int:
    """Lines that are not blank and hold more than a comment or a docstring."""
    text_lines = {
        line
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    token_lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        if token.type not in blank
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(token_lines - text_lines)


# -- imports ----------------------------------------------------------------------------------------------------------


def imported_modules(path: Path, *, at_import_time: bool) -> set[str]:
    """Our modules that a file imports.

    Args:
        at_import_time: without those imported in a function or under ``if TYPE_CHECKING``.
    """
    module = module_name(path)
    package = (module if path.name == "__init__.py" else module.rpartition(".")[0]).split(".")
    names = set[str]()
    for node in _nodes(tree_of(path), at_import_time):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            submodules = {f"{base}.{alias.name}" for alias in node.names}
            names |= submodules if submodules <= MODULES.keys() else {base, *submodules}
    return names & MODULES.keys()


def _nodes(tree: ast.AST, at_import_time: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not (at_import_time and (is_function or is_for_types)):
            yield child
            yield from _nodes(child, at_import_time)


def modules_below(module: str) -> set[str]:
    """The modules that one needs at its import, itself included; empty ``__init__`` files are left out."""
    needed, waiting = set[str](), [module]
    while waiting:
        module = waiting.pop()
        if module not in needed:
            needed.add(module)
            waiting += imported_modules(MODULES[module], at_import_time=True)
    return {module for module in needed if code_lines(MODULES[module])}


def room_of(module: str) -> str:
    return (module.split(".") + [""])[1]


def arrows() -> set[tuple[str, str]]:
    """``(room, room that it imports)``, in type annotations too; a package's public name counts as its home."""
    homes = {
        alias.asname or alias.name: room_of(str(node.module))
        for node in ast.walk(tree_of(MODULES["ignite_engine"]))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = set[tuple[str, str]]()
    for module, path in MODULES.items():
        rooms = {room_of(name) for name in imported_modules(path, at_import_time=False)}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "ignite_engine":
                rooms |= {homes[alias.name] for alias in node.names if alias.name in homes}
        found |= {(room_of(module), room) for room in rooms - {"", room_of(module)}}
    return {(room, imported) for room, imported in found if room not in ("", "__main__")}


def module_arrows() -> set[tuple[str, str]]:
    """``(module, module that it needs at its import)``."""
    pairs = {(module, name) for module, path in MODULES.items() for name in imported_modules(path, at_import_time=True)}
    return {(module, name) for module, name in pairs if module != name}


def circles(pairs: Collection[tuple[str, str]]) -> int:
    """Groups of nodes of which each reaches all others."""
    nodes = {node for pair in pairs for node in pair}
    reached = {node: {node} for node in nodes}
    for _ in nodes:
        for node, imported in pairs:
            reached[node] |= reached[imported]
    groups = {frozenset(other for other in reached[node] if node in reached[other]) for node in nodes}
    return sum(len(group) > 1 for group in groups)


def arrows_up(pairs: Collection[tuple[str, str]]) -> int:
    """Arrows from a room to one that stands below it in the page's table of rooms, which is read from the ground up."""
    order = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    place = {room: number for number, room in enumerate(order)}
    return sum(place[room] < place[imported] for room, imported in pairs)


# -- features ---------------------------------------------------------------------------------------------------------


def files_that_know(feature: Feature) -> list[str]:
    """Files outside the feature's own that name it or import its modules."""
    own = {
        module
        for module, path in MODULES.items()
        if any(fnmatch.fnmatch(path.relative_to(ROOT).as_posix(), pattern) for pattern in feature.own_files)
    }
    return [
        str(path.relative_to(ROOT))
        for module, path in MODULES.items()
        if module not in own
        and (
            any(re.search(feature.names, name) for name in identifiers(path))
            or own & imported_modules(path, at_import_time=False)
        )
    ]


@functools.cache
def identifiers(path: Path) -> frozenset[str]:
    with path.open(encoding="utf-8") as file:
        return frozenset(
            token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME
        )


# -- fields -----------------------------------------------------------------------------------------------------------


def mutable_fields(classes: Collection[tuple[str, str]]) -> tuple[int, int, int]:
    """Attributes that the classes' methods assign on self, ``__init__`` included, and fields of dataclasses.

    Args:
        classes: ``(module, name)``; frozen dataclasses count nothing.

    Returns:
        All of them, those assigned a boolean somewhere, and those that another method than ``__init__`` assigns.
    """
    fields = booleans = changing = 0
    for module, name in classes:
        for node in ast.walk(tree_of(MODULES[module])):
            if isinstance(node, ast.ClassDef) and node.name == name and not _is_frozen(node):
                values = _assigned_on_self(node)
                fields += len(values)
                booleans += sum(any(map(_is_boolean, assigned)) for assigned in values.values())
                later = [part for part in node.body if getattr(part, "name", "") != "__init__"]
                is_plain = any(getattr(part, "name", "") == "__init__" for part in node.body)
                rest = ast.ClassDef(node.name, node.bases, node.keywords, later, [])
                changing += len(_assigned_on_self(rest)) if is_plain else len(values)
    return fields, booleans, changing


def _is_frozen(node: ast.ClassDef) -> bool:
    return any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list) or any(
        ast.unparse(base).rpartition(".")[2] in ("NamedTuple", "Enum", "IntEnum", "Protocol", "Exception")
        for base in node.bases
    )


def _assigned_on_self(node: ast.ClassDef) -> dict[str, list[ast.expr | None]]:
    values: dict[str, list[ast.expr | None]] = {}
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                annotated_bool = ast.Constant(ast.unparse(statement.annotation) == "bool" or None)
                values.setdefault(statement.target.id, []).append(annotated_bool)
    for child in ast.walk(node):
        if isinstance(child, ast.Assign):
            pairs = [pair for target in child.targets for pair in _pairs(target, child.value)]
        elif isinstance(child, ast.AnnAssign | ast.AugAssign):
            pairs = [(child.target, child.value)]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                values.setdefault(target.attr, []).append(value)
    return values


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        return list(zip(target.elts, value.elts))
    return [(element, None) for element in target.elts]


def _is_boolean(value: ast.expr | None) -> bool:
    return (
        isinstance(value, ast.Compare)
        or (isinstance(value, ast.Constant) and isinstance(value.value, bool))
        or (isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not))
    )


# -- a run ------------------------------------------------------------------------------------------------------------


class Calls:
    """Counts the calls of our own Python functions in this thread, between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.count = Counter[str]()

    def start(self) -> None:
        sys.setprofile(self._count)

    @staticmethod
    def stop() -> None:
        sys.setprofile(None)

    def _count(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and (path := our_file(frame.f_code.co_filename)) is not None:
            self.count[path] += 1

    def figures(self) -> tuple[int, int]:
        """Calls, and the files that they were in."""
        return self.count.total(), len(self.count)


@functools.cache
def our_file(filename: str) -> str | None:
    """The path of one of our modules within the repository; None for all others."""
    try:
        relative = Path(filename).resolve().relative_to(ROOT)
    except ValueError:
        return None
    return str(relative) if relative.parts[0] in ("ignite_engine", "handlers") else None


def measure_runs() -> dict[str, Any]:
    """In a fresh interpreter: the modules that are loaded, calls, classes, and frames to the optimizer's step."""
    from ignite_engine import Trainer

    Trainer(lambda engine, batch: 0.0).run([1, 2], max_epochs=1)
    loaded = set(sys.modules) & MODULES.keys()
    with tempfile.TemporaryDirectory() as folder:
        _run_and_resume(Path(folder) / "first")  # what is imported or made at its first use is not counted
        figures = _run_and_resume(Path(folder) / "second")
        classes = _classes_made(Path(folder) / "third")
        frames = _frames_to_the_step(Path(folder) / "fourth")
    return {"loaded": sorted(loaded), "classes": classes, "frames": frames, **figures}


def _tiny_run(folder: Path, optimizer_class: Any = None) -> tuple[Any, Any, Any, list[Callable[[], None]]]:
    """A trainer as in the README, its Checkpoint, its data, and what the data calls before it gives a sample."""
    import torch
    from ignite.engine import Events

    from ignite_engine import Trainer, Update, loader
    from ignite_engine.handlers import Checkpoint, GracefulStop, LRSchedule, MetricLogger, warmup_cosine

    before_a_sample: list[Callable[[], None]] = []

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 96

        def __getitem__(self, index: int) -> Any:
            for callback in before_a_sample:
                callback()
            return torch.full((3,), index / 96), torch.ones(1)

    def squared_error(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = (optimizer_class or torch.optim.AdamW)(model.parameters(), lr=1e-3)
    trainer = Trainer(Update(model, optimizer, squared_error, clip_norm=1.0), accumulation_steps=2)
    LRSchedule(warmup_cosine(optimizer, warmup=3, total=LAST_ITERATION)).attach(trainer)
    MetricLogger(folder, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=LOG_EVERY))
    checkpoint = Checkpoint(folder / "checkpoints", keep_last=2)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=SAVE_EVERY))
    GracefulStop().attach(trainer)
    return trainer, checkpoint, loader(Samples(), 2, shuffle=True), before_a_sample


def _run_and_resume(folder: Path) -> dict[str, tuple[int, int]]:
    from ignite.engine import Events

    first_fetch, resume, stop, iterations = Calls(), Calls(), Calls(), [Calls() for _ in range(LAST_ITERATION + 1)]

    def change_iteration() -> None:
        Calls.stop()
        iterations[trainer.state.iteration].start()

    trainer, _, data, before_a_sample = _tiny_run(folder)
    trainer.add_event_handler(Events.ITERATION_STARTED, change_iteration)
    before_a_sample.append(lambda: Calls.stop() if trainer.state.iteration == 0 else None)
    first_fetch.start()
    trainer.run(data, max_iters=LAST_ITERATION)
    Calls.stop()

    _, checkpoint, _, _ = _tiny_run(folder)
    resume.start()
    checkpoint.resume()
    Calls.stop()

    def request_stop() -> None:
        if trainer.state.iteration == STOP_AT:
            stop.start()
            trainer.request_stop("measured")

    trainer, _, data, _ = _tiny_run(folder / "stopped")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, request_stop)
    trainer.run(data, max_iters=LAST_ITERATION)
    Calls.stop()

    return {
        "quiet": iterations[QUIET_ITERATION].figures(),
        "save": iterations[SAVE_EVERY].figures(),
        "first fetch": first_fetch.figures(),
        "resume": resume.figures(),
        "stop": stop.figures(),
    }


def _classes_made(folder: Path) -> list[tuple[str, str]]:
    """``(module, name)`` of those of STATEFUL_FILES of which a run, or one over windows, makes an instance."""
    made = set[tuple[str, str]]()

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "__init__" and frame.f_code.co_argcount:
            kind = type(frame.f_locals[frame.f_code.co_varnames[0]])
            made.update((base.__module__, base.__name__) for base in kind.__mro__ if base.__module__ in MODULES)

    from ignite_engine import Trainer, Windows

    sys.setprofile(note)
    trainer, _, data, _ = _tiny_run(folder)
    trainer.run(data, max_iters=LAST_ITERATION)
    Trainer(lambda engine, batch: 0.0).run(Windows([1, 2], lambda window: [window]), max_epochs=1)
    sys.setprofile(None)
    paths = {module: MODULES[module].relative_to(ROOT).as_posix() for module, _ in made}
    return sorted(
        (module, name)
        for module, name in made
        if any(fnmatch.fnmatch(paths[module], pattern) for pattern in STATEFUL_FILES)
        and not any(fnmatch.fnmatch(paths[module], pattern) for pattern in STATELESS_FILES)
    )


def _frames_to_the_step(folder: Path) -> int:
    """From ``Trainer.run`` to the call of ``optimizer.step()``, without those of other packages."""
    import torch

    depths = list[int]()

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            depths.append(
                sum(our_file(frame.f_code.co_filename) is not None for frame, _ in traceback.walk_stack(None))
            )
            return super().step(closure)

    trainer, _, data, _ = _tiny_run(folder, Watched)
    trainer.run(data, max_iters=1)
    return depths[0]


# -- the table --------------------------------------------------------------------------------------------------------


def table() -> str:
    """The rows, as Markdown."""
    script = [sys.executable, str(Path(__file__).resolve()), "--runs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"The tiny run failed:\n{done.stderr}")
    runs = json.loads(done.stdout.splitlines()[-1])
    below, loaded = modules_below("ignite_engine.trainer"), {name for name in runs["loaded"]}
    fields, booleans, changing = mutable_fields([(module, name) for module, name in runs["classes"]])
    pairs = arrows()
    rows = [
        ("lines of code", f"{sum(map(code_lines, MODULES.values())):,}"),
        ("modules (lines) below `trainer` by its imports", _modules(below)),
        ("modules (lines) that a `Trainer` loads which runs without handlers", _modules(loaded)),
        *((f"files that know of {name}", str(len(files_that_know(it)))) for name, it in FEATURES.items()),
        ("mutable fields of the classes of a run, booleans among them", f"{fields}, {booleans}"),
        ("- of which another method than the constructor assigns", str(changing)),
        ("own calls (files) of a quiet iteration of 2 micro-batches", _calls(runs["quiet"])),
        ("- of one that saves this tiny run", _calls(runs["save"])),
        ("- of a fresh `run()` to its first fetch", _calls(runs["first fetch"])),
        ("- of `checkpoint.resume()`", _calls(runs["resume"])),
        ("- from `request_stop` to the end of `run()`", _calls(runs["stop"])),
        (f"modules of more than {LONG} lines", str(sum(lines_of(path) > LONG for path in MODULES.values()))),
        ("frames from `Trainer.run` to `optimizer.step`", str(runs["frames"])),
        ("circles among modules, at import", str(circles(module_arrows()))),
        ("arrows between rooms, those up the table of rooms", f"{len(pairs)}, {arrows_up(pairs)}"),
    ]
    return "\n".join(["| measured | now |", "|---|---|", *(f"| {name} | {figure} |" for name, figure in rows)])


def _modules(modules: Collection[str]) -> str:
    return f"{len(modules)} ({sum(lines_of(MODULES[module]) for module in modules):,})"


def _calls(figures: tuple[int, int]) -> str:
    return f"{figures[0]:,} ({figures[1]})"


def written_table(page: str) -> str:
    """The table between the markers of a page."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def main(arguments: list[str] | None = None) -> int:
    """Write the table; returns 1 if ``--check`` finds another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the table is stale")
    parser.add_argument("--runs", action="store_true", help="print as JSON what runs alone can tell")
    options = parser.parse_args(arguments)
    if options.runs:
        print(json.dumps(measure_runs()))
        return 0
    page, measured = PAGE.read_text(encoding="utf-8"), table()
    print(measured)
    if measured == written_table(page):
        return 0
    if options.check:
        print("The table in docs/architecture.md is stale: run make house.", file=sys.stderr)
        return 1
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{measured}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
