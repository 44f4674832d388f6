"""SIGKILL at each file operation of the saves and prunes of a training process, one by one."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

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
    """One for each operation of an uninterrupted run; with background saves their number varies a little."""
    made: list[Item] = []
    for background in (False, True):
        count = len(_count_operations(bench, background))
        kind = "in the background" if background else "in the loop"
        made += [Item("operations", f"{kind} {at}", partial(_run, background, at)) for at in range(count)]
    return made


def _sections(background: bool) -> dict[str, Any]:
    return {
        "run": {"max_epochs": None, "max_iterations": 9},
        "checkpoint": {"every": 3, "keep_last": 1, "best": None, "mode": "min", "background": background},
    }


def _count_operations(bench: Bench, background: bool) -> list[list[str]]:
    folder = bench.folder / "counting"
    shutil.rmtree(folder, ignore_errors=True)
    config = write_config(folder, **_sections(background))
    arguments = [str(config), str(folder / "run" / "checkpoints"), None, str(folder / "notes.json")]
    if bench.servers[0].call(TRAIN, *arguments, output=folder / "output.txt") != 0:
        raise Difference(f"the uninterrupted run failed: {tail(folder)}")
    seen: list[list[str]] = json.loads((folder / "notes.json").read_text())
    return seen


def _run(background: bool, at: int, bench: Bench) -> dict[str, Any]:
    expected = reference(bench, "operations", **_sections(False))
    folder = bench.folder / "run"
    config = write_config(folder, **_sections(background))
    arguments = [str(config), str(folder / "run" / "checkpoints"), at, str(folder / "notes.json")]
    code = bench.servers[0].call(TRAIN, *arguments, output=folder / "output.txt")
    seen = json.loads((folder / "notes.json").read_text())
    if code != -signal.SIGKILL or len(seen) != at + 1:
        raise Difference(f"not killed at operation {at}: code {code}, {len(seen)} operations; {tail(folder)}")
    newest = newest_iteration(folder)
    commits = [each for each in seen[:-1] if each[0] == "rename" and each[1].startswith(".tmp-")]
    if newest != (3 * len(commits) or None):
        raise Difference(f"{len(commits)} checkpoints were committed, the newest is of iteration {newest}")
    resume_and_compare(bench, config, expected)
    if names_in(folder) != ["iteration_00000009"]:
        raise Difference(f"left behind: {names_in(folder)}")
    return {"killed_before": seen[-1], "newest": newest}
