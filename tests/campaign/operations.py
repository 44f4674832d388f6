"""SIGKILL at each file operation of the saves and prunes of a training process, one by one."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.cli import main
from tests.campaign.resuming import Difference
from tests.campaign.runs import (
    Bench,
    Item,
    names_in,
    newest_iteration,
    reference,
    resume_and_compare,
    tail,
    write_config,
)
from tests.checkpointing.file_faults import FileOperations, kill_this_process

TRAIN = "tests.campaign.operations:train_and_die"


def train_and_die(config: str, root: str, at: int | None, notes: str) -> int:
    """``train``, killed before its operation ``at`` under ``root`` (in the middle of it, if it writes).

    Writes the operations so far to ``notes``.
    """
    watched = FileOperations(Path(root), at=at, action=lambda: _note_and_die(watched, notes))
    with watched:
        code = main(["train", config])
    Path(notes).write_text(json.dumps(watched.seen))
    return code


def _note_and_die(watched: FileOperations, notes: str) -> None:
    Path(notes).write_text(json.dumps(watched.seen))
    kill_this_process()


def items(bench: Bench) -> list[Item]:
    """One for each operation of an uninterrupted run; with background saves, of the shortest of three."""
    return _items("operations", bench, 3, "", run={"max_epochs": None, "max_iterations": 9})


def items_by_rows(bench: Bench) -> list[Item]:
    """Likewise, with a table saved by the rows that changed: a base, two of rows, a base that ends the chain, one of
    rows; after it the first chain is pruned."""
    return _items(
        "changed rows",
        bench,
        1,
        "words.*",
        run={"max_epochs": None, "max_iterations": 5},
        task_options={"rows": 64},
        optimizer={"name": "RowwiseAdagrad", "lr": 0.02},
    )


def _items(section: str, bench: Bench, every: int, tables: str, **sections: Any) -> list[Item]:
    made: list[Item] = []
    for background in (False, True):
        checkpoint = {"every": every, "keep_last": 1, "best": None, "mode": "min", "background": background}
        checkpoint |= {"delta_rows": [tables]} if tables else {}
        setup = {**sections, "checkpoint": checkpoint}
        # a save in the background, on a busy machine, took 4 operations more than ever after
        count = min(len(_count_operations(bench, setup)) for _ in range(3 if background else 1))
        kind = "in the background" if background else "in the loop"
        made += [Item(section, f"{kind} {at}", partial(_run, section, setup, at)) for at in range(count)]
    return made


def _count_operations(bench: Bench, setup: dict[str, Any]) -> list[list[str]]:
    folder = bench.folder / "counting"
    shutil.rmtree(folder, ignore_errors=True)
    config = write_config(folder, **setup)
    arguments = [str(config), str(folder / "run" / "checkpoints"), None, str(folder / "notes.json")]
    if bench.servers[0].call(TRAIN, *arguments, output=folder / "output.txt") != 0:
        raise Difference(f"the uninterrupted run failed: {tail(folder)}")
    seen: list[list[str]] = json.loads((folder / "notes.json").read_text())
    return seen


def _run(section: str, setup: dict[str, Any], at: int, bench: Bench) -> dict[str, Any]:
    expected = reference(bench, section, **{**setup, "checkpoint": setup["checkpoint"] | {"background": False}})
    folder, every = bench.folder / "run", setup["checkpoint"]["every"]
    config = write_config(folder, **setup)
    arguments = [str(config), str(folder / "run" / "checkpoints"), at, str(folder / "notes.json")]
    code = bench.servers[0].call(TRAIN, *arguments, output=folder / "output.txt")
    seen = json.loads((folder / "notes.json").read_text())
    if code != -signal.SIGKILL or len(seen) != at + 1:
        raise Difference(f"not killed at operation {at}: code {code}, {len(seen)} operations; {tail(folder)}")
    newest = newest_iteration(folder)
    commits = [each for each in seen[:-1] if each[0] == "rename" and each[1].startswith(".tmp-")]
    if newest != (every * len(commits) or None):
        raise Difference(f"{len(commits)} checkpoints were committed, the newest is of iteration {newest}")
    resume_and_compare(bench, config, expected)
    _check_what_is_left(folder, setup["run"]["max_iterations"])
    return {"killed_before": seen[-1], "newest": newest}


def _check_what_is_left(folder: Path, iteration: int) -> None:
    """The last checkpoint and those that it needs, all of them whole."""
    store = CheckpointStore(folder / "run" / "checkpoints")
    left = store.checkpoints()
    wanted = sorted([f"iteration_{iteration:08d}", *(left[-1].manifest.needed if left else ())])
    if names_in(folder) != wanted or (broken := [each for found in left for each in store.verify(found.path)]):
        raise Difference(f"left behind: {names_in(folder)}, not {wanted}{'' if names_in(folder) != wanted else broken}")
