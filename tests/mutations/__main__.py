"""Mutations drawn over the code of the promises, each in a copy of the repository; the tests named for it must fail.

Usage: ``python -m tests.mutations [--seed 1] [--count 60] [--only 3,7] [--limit SECONDS] [--list] [--all]``
``[--results FILE]``. The tests are those that docs/features.md names, the nearest to the changed module first, then the
others of its room; ``--all`` goes on with those that are not named, to find one that a row should name. It exits with 1
if more than one in twenty is not caught. What a file of results has is not run again.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import islice
from pathlib import Path

from tests.mutations.draw import Mutation, drawn
from tests.mutations.equivalent import EQUIVALENT
from tests.mutations.tree import ROOT, Result, Tree

_CHECKPOINT = (
    "tests/handlers/test_checkpoint.py",
    "tests/handlers/checkpoint",
    "tests/handlers/test_background_save.py",
)
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "recovery": (("ignite_engine/recovery",), ("tests/recovery",)),
    "mirror": (("ignite_engine/mirror",), ("tests/mirror", "tests/cli/test_mirrors.py")),
    "follower": (("ignite_engine/follower",), ("tests/follower",)),
    "replay": (("ignite_engine/replay",), ("tests/replay",)),
    "capture": (("ignite_engine/capture",), ("tests/capture",)),
    "data": (
        ("ignite_engine/data",),
        (
            "tests/data",
            "tests/test_trainer.py",
            "tests/runs/test_data.py",
            "tests/engine/test_continuing.py",
            "tests/ranks/test_agreed",
            "tests/ranks/test_shares",
            "tests/ranks/test_other_ranks",
        ),
    ),
    "engine": (("ignite_engine/engine",), ("tests/engine", "tests/test_trainer.py", "tests/data", "tests/faults")),
    "checkpointing": (
        ("ignite_engine/checkpointing",),
        ("tests/checkpointing", *_CHECKPOINT, "tests/cli/test_checkpoints.py"),
    ),
    "ranks": (("ignite_engine/ranks",), ("tests/ranks",)),
    "states": (
        ("ignite_engine/states",),
        (
            "tests/states",
            "tests/checkpointing/test_loading",
            "tests/checkpointing/load",
            "tests/checkpointing/test_save_filter.py",
            *_CHECKPOINT,
            "tests/handlers/test_model_bank.py",
            "tests/follower",
        ),
    ),
    "step": (("ignite_engine/step",), ("tests/step", "tests/test_update.py", "tests/ranks/test_invariant.py")),
    "update": (
        ("ignite_engine/update", "ignite_engine/rng.py", "ignite_engine/schedules.py", "ignite_engine/trainer.py"),
        (
            "tests/test_update",
            "tests/test_schedules.py",
            "tests/test_rng.py",
            "tests/test_trainer.py",
            "tests/step",
            "tests/handlers/test_lr_schedule.py",
        ),
    ),
    "handlers": (
        (
            *("handlers/checkpoint", "handlers/evaluation", "handlers/ema.py", "handlers/lr_schedule.py"),
            *(
                "handlers/early_stopping.py",
                "handlers/graceful_stop.py",
                "handlers/metric_logger.py",
                "handlers/meters.py",
            ),
        ),
        (
            *_CHECKPOINT,
            "tests/handlers/evaluation",
            "tests/handlers/test_me",
            "tests/handlers/test_lr_schedule.py",
            "tests/faults",
        ),
    ),
    "runs": (("ignite_engine/runs",), ("tests/runs", "tests/cli/test_commands.py", "tests/faults")),
    "accumulation": (("ignite_engine/accumulation",), ("tests/accumulation",)),
}
"""The code that carries promises, by room, and the beginnings of the paths of its tests."""
_SLOW = r"pytest\.mark\.(distributed|faults|slow|long)"
_ALLOWED = 1 / 20


def named_tests() -> list[str]:
    """Every test that docs/features.md names."""
    table = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(r"`(tests/[^`]+::\w+)[^`]*`", table)))


def nearest(path: str, folders: Sequence[str], named: Sequence[str]) -> list[list[str]]:
    """The named tests of these folders in the turns in which they are run.

    First those of the changed module, then the others, in both those that start no processes first.
    """
    stem = Path(path).stem.removeprefix("_")
    turns: list[list[str]] = [[], [], [], []]
    for test in (test for folder in folders for test in named if test.startswith(folder)):
        file, _, name = test.partition("::")
        is_near = Path(file).stem == f"test_{stem}"
        turns[2 * (not is_near) + (name in _starting_processes(file))].append(test)
    return [turn for turn in turns if turn]


@cache
def _starting_processes(file: str) -> set[str]:
    """The tests of a file that have a mark of those that start processes, or take long."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    of_all = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    if any(re.search(_SLOW, text) for text in of_all if text.startswith("pytestmark")):
        return {test.name for test in tests}
    return {test.name for test in tests if any(re.search(_SLOW, ast.unparse(mark)) for mark in test.decorator_list)}


def chosen(seed: int, count: int) -> Iterator[tuple[str, Mutation]]:
    """As many of each room, but for those that are known to change nothing."""
    rooms = list(ROOMS)
    for number, room in enumerate(rooms):
        paths = [
            path
            for place in ROOMS[room][0]
            for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
        ]
        mutations = (mutation for mutation in drawn(paths, ROOT, f"{seed} {room}") if mutation.key not in EQUIVALENT)
        share = count // len(rooms) + (number < count % len(rooms))
        yield from ((room, mutation) for mutation in islice(mutations, share))


def others(folders: Sequence[str], named: Sequence[str]) -> list[str]:
    """Arguments for the tests of these folders that are not named, but for the slow and the long ones."""
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if str(path.relative_to(ROOT)).startswith(tuple(folders))
    )
    marks = "not slow and not long and not cuda and not accelerator"
    return ["-m", marks, *(f"--deselect={test}" for test in named), *files]


def run(tree: Tree, room: str, mutation: Mutation, turns: Sequence[Sequence[str]], limit_s: float) -> Result:
    """What the tests give, turn by turn until one fails."""
    source, seconds = (ROOT / mutation.path).read_text(encoding="utf-8"), 0.0
    with tree.changed(mutation.path, mutation.applied(source)):
        for tests in turns:
            result = tree.test(["--timeout=150", *tests], timeout_s=limit_s - seconds)
            seconds += result.seconds
            if result.how != "passed":
                break
    return replace(result, seconds=seconds)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", default="", help="numbers of mutations, such as 3,7")
    parser.add_argument("--list", action="store_true", help="print them and run nothing")
    parser.add_argument("--all", action="store_true", help="then run the tests that no row names, too")
    parser.add_argument("--results", type=Path, help="a file of JSON lines, which is continued")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for the tests of one mutation")
    options = parser.parse_args(arguments)
    only = {int(number) for number in options.only.split(",") if number}
    done: dict[str, bool] = {}
    if options.results is not None and options.results.exists():
        lines = map(json.loads, options.results.read_text(encoding="utf-8").splitlines())
        done = {line["key"]: line["caught_by"] is not None for line in lines}
    named, outcomes = named_tests(), list[bool]()
    with tempfile.TemporaryDirectory() as folder:
        tree = None if options.list else Tree(Path(folder) / "tree")
        for number, (room, mutation) in enumerate(chosen(options.seed, options.count), start=1):
            if only and number not in only:
                continue
            if tree is None:
                print(f"{number} {mutation}")
                continue
            if mutation.key not in done:
                folders = ROOMS[room][1]
                turns = nearest(mutation.path, folders, named)
                turns += [others(folders, named)] if options.all else []
                result = run(tree, room, mutation, turns, options.limit)
                done[mutation.key] = result.caught_by is not None
                said = result.caught_by or "NOT CAUGHT"
                print(
                    f"{number} {mutation}: {said} ({result.how}, {result.seconds:.0f} s) {result.last_line}", flush=True
                )
                if options.results is not None:
                    row = {"number": number, "room": room, "key": mutation.key, "line": mutation.line, **asdict(result)}
                    with options.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
            outcomes.append(done[mutation.key])
    if options.list:
        return 0
    missed = outcomes.count(False)
    print(f"{len(outcomes)} mutations, {len(outcomes) - missed} caught.")
    return int(missed > _ALLOWED * len(outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
