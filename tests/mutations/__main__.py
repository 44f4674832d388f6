"""Mutations drawn over the code of the promises, each in a copy of the repository; the tests named for it must fail.

Usage: ``python -m tests.mutations [--seed 1] [--count 60] [--only 3,7] [--list] [--results FILE]``. The tests are those
that docs/features.md names, the nearest to the changed module first, then the others of its room. It exits with 1 if
more than one in twenty passes. With a file of results, what is in it already is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from tests.mutations.draw import Mutation, drawn
from tests.mutations.equivalent import EQUIVALENT
from tests.mutations.tree import ROOT, Result, Tree

ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "recovery": (("ignite_engine/recovery",), ("tests/recovery", "tests/ranks")),
    "mirror": (("ignite_engine/mirror",), ("tests/mirror", "tests/cli")),
    "follower": (("ignite_engine/follower",), ("tests/follower",)),
    "replay": (("ignite_engine/replay",), ("tests/replay",)),
    "capture": (("ignite_engine/capture",), ("tests/capture",)),
    "data": (
        ("ignite_engine/data",),
        ("tests/data", "tests/test_trainer.py", "tests/runs/test_data.py", "tests/ranks"),
    ),
    "engine": (("ignite_engine/engine",), ("tests/engine", "tests/test_trainer.py", "tests/handlers", "tests/faults")),
    "checkpointing": (("ignite_engine/checkpointing",), ("tests/checkpointing", "tests/handlers", "tests/cli")),
    "ranks": (("ignite_engine/ranks",), ("tests/ranks", "tests/checkpointing", "tests/cli")),
    "states": (
        ("ignite_engine/states",),
        ("tests/states", "tests/test_trainer.py", "tests/checkpointing", "tests/handlers"),
    ),
    "step": (
        ("ignite_engine/step",),
        ("tests/step", "tests/test_update.py", "tests/test_sparse_with_dense.py", "tests/ranks"),
    ),
    "update": (
        ("ignite_engine/update", "ignite_engine/rng.py", "ignite_engine/schedules.py", "ignite_engine/trainer.py"),
        ("tests/test_update", "tests/test_schedules.py", "tests/test_trainer.py", "tests/step", "tests/handlers"),
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
        ("tests/handlers", "tests/faults"),
    ),
    "runs": (("ignite_engine/runs",), ("tests/runs", "tests/faults", "tests/cli")),
    "accumulation": (("ignite_engine/accumulation",), ("tests/accumulation",)),
}
"""The code that carries promises, by room, and the beginnings of the paths of its tests."""
_TIMEOUT_S = 240.0
_ALLOWED = 1 / 20


def named_tests() -> list[str]:
    """Every test that docs/features.md names."""
    table = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(r"`(tests/[^`]+::\w+)[^`]*`", table)))


def nearest(path: str, folders: Sequence[str], named: Sequence[str]) -> list[str]:
    """The named tests of these folders, those of the changed module and its neighbours first."""
    stem = Path(path).stem.removeprefix("_")
    module = path.removesuffix(".py").replace("/", ".").removeprefix("handlers.")

    def distance(test: str) -> tuple[int, int]:
        file = test.partition("::")[0]
        folder = next(number for number, folder in enumerate(folders) if test.startswith(folder))
        if Path(file).stem == f"test_{stem}":
            return 0, folder
        text = (ROOT / file).read_text(encoding="utf-8")
        return (1 if module in text or stem in Path(file).stem else 2), folder

    return sorted((test for test in named if test.startswith(tuple(folders))), key=distance)


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


def run(tree: Tree, room: str, mutation: Mutation, named: Sequence[str]) -> Result:
    source = (ROOT / mutation.path).read_text(encoding="utf-8")
    tests = nearest(mutation.path, ROOMS[room][1], named)
    with tree.changed(mutation.path, mutation.applied(source)):
        return tree.test(tests, timeout_s=_TIMEOUT_S)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", default="", help="numbers of mutations, such as 3,7")
    parser.add_argument("--list", action="store_true", help="print them and run nothing")
    parser.add_argument("--results", type=Path, help="a file of JSON lines, which is continued")
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
                result = run(tree, room, mutation, named)
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
