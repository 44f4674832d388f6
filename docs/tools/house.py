"""Prints the size of each room, and the totals that the project keeps an eye on: ``python docs/tools/house.py``.

Code lines are lines with a token of code: no blank line, comment or docstring. A room is a package or module directly
below ``ignite_engine/`` or ``ignite_engine/ext/``, or ``handlers/``. All figures are counts and no limits.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension),
    *(ast.Assert, ast.match_case),
)
# Of the tiny run: nothing is logged or saved in the quiet iteration.
QUIET_ITERATION, LAST_ITERATION = 19, 23


@dataclass
class Size:
    """Counts of some source."""

    lines: int = 0
    tokens: int = 0
    names: int = 0
    branches: int = 0

    def add(self, other: Size) -> None:
        """Count another one in."""
        self.__init__(*map(sum, zip(astuple(self), astuple(other))))  # type: ignore[misc]  # the fields, anew


def size_of(path: Path) -> Size:
    """Code lines, tokens, functions and classes, and branches of a file."""
    source = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = set[int]()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT and token.start[0] not in docstrings
    ]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    names = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in nodes)
    branches = sum(isinstance(node, BRANCHES) for node in nodes)
    branches += sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return Size(len(lines - docstrings), len(tokens), names, branches)


def sources() -> Iterator[tuple[str, Path]]:
    """Each file of the engine with its room; the link ``ignite_engine/handlers`` is not followed."""
    for path in sorted((ROOT / "ignite_engine").rglob("*.py")):
        parts = path.relative_to(ROOT / "ignite_engine").with_suffix("").parts
        if parts[0] != "handlers":
            yield "/".join(parts[: 2 if parts[0] == "ext" else 1]), path
    for path in sorted((ROOT / "handlers").rglob("*.py")):
        yield "handlers", path


def words(*pages: Path) -> int:
    """Words of some pages, and of all below a folder."""
    files = [file for page in pages for file in (page.rglob("*.md") if page.is_dir() else [page])]
    return sum(len(file.read_text(encoding="utf-8").split()) for file in files)


def settings() -> int:
    """Keys of a config."""
    from ignite_engine.runs.config.load import config_from_dict

    values = config_from_dict({"task": "task.py:build", "run": {"max_epochs": 1}}).to_dict()
    sections = {"run", "data", "update", "distributed"}
    return sum(len(value) if key in sections else 1 for key, value in values.items())


@cache
def is_ours(filename: str) -> bool:
    """Whether a function of this file is one of the engine's."""
    path = Path(filename).resolve()
    return path.is_relative_to(ROOT / "ignite_engine") or path.is_relative_to(ROOT / "handlers")


def calls_of_an_iteration(folder: Path) -> Counter[str]:
    """The engine's functions that a quiet iteration of two micro-batches calls, counted by file."""
    import torch
    from ignite.engine import Events

    from ignite_engine import Trainer, Update, loader
    from ignite_engine.handlers import Checkpoint, GracefulStop, LRSchedule, MetricLogger, warmup_cosine

    def squared_error(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    calls = Counter[str]()

    def count(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_ours(frame.f_code.co_filename):
            calls[frame.f_code.co_filename] += 1

    def begin_or_end(trainer: Trainer) -> None:
        sys.setprofile(count if trainer.state.iteration == QUIET_ITERATION else None)

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = Trainer(Update(model, optimizer, squared_error, clip_norm=1.0), accumulation_steps=2)
    LRSchedule(warmup_cosine(optimizer, warmup=3, total=LAST_ITERATION)).attach(trainer)
    MetricLogger(folder, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=5))
    Checkpoint(folder / "checkpoints", keep_last=2).attach(trainer, Events.ITERATION_COMPLETED(every=7))
    GracefulStop().attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, begin_or_end)
    data = torch.utils.data.TensorDataset(torch.randn(96, 3), torch.randn(96, 1))
    trainer.run(loader(data, 2, shuffle=True), max_iters=LAST_ITERATION)
    return calls


def in_a_process() -> dict[str, int]:
    """What takes a run or an import of the engine, measured in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--in-a-process"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print two tables."""
    rooms: dict[str, Size] = defaultdict(Size)
    floors: dict[str, Size] = defaultdict(Size)
    for room, path in sources():
        size = size_of(path)
        rooms[room].add(size)
        for floor in ("all", "handlers" if room == "handlers" else "ext" if room.startswith("ext/") else "core"):
            floors[floor].add(size)
    print(f"{'room':24} {'lines':>7} {'tokens':>8} {'names':>6} {'branches':>8}")
    for name, size in [*sorted(rooms.items()), *floors.items()]:
        print(f"{name:24} {size.lines:7,} {size.tokens:8,} {size.names:6,} {size.branches:8,}")
    runs = in_a_process()
    entries = [path for path in (ROOT / "ignite_engine").iterdir() if path.suffix == ".py" or path.is_dir()]
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "__pycache__" not in path.parts]
    print()
    for name, figure in {
        "entries of ignite_engine/": len([path for path in entries if path.name != "__pycache__"]),
        "exported names": runs["names"],
        "settings": runs["settings"],
        "lines of tests": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
        "words of docs/": words(ROOT / "docs"),
        "words of the README": words(ROOT / "README.md"),
        "words of the changelog": words(ROOT / "CHANGELOG.md"),
        "calls of a quiet iteration": runs["calls"],
        "files that these are in": runs["files"],
    }.items():
        print(f"{name:32} {figure:8,}")


if __name__ == "__main__":
    if "--in-a-process" in sys.argv:
        import ignite_engine
        from ignite_engine import handlers

        with tempfile.TemporaryDirectory() as scratch:
            calls_of_an_iteration(Path(scratch) / "first")  # what is imported at its first use is not counted
            counted = calls_of_an_iteration(Path(scratch) / "second")
        names = len({*ignite_engine.__all__, *handlers.__all__})
        print(json.dumps({"names": names, "settings": settings(), "calls": counted.total(), "files": len(counted)}))
    else:
        main()
