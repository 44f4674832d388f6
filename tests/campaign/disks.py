"""Disks that are full or read-only while a run saves: one log line each, training continues, earlier saves remain."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ignite.engine import Events

from ignite_engine import TrainingEvents
from ignite_engine.checkpointing import CheckpointError
from ignite_engine.cli import main
from ignite_engine.config import load_config
from ignite_engine.run_directory import RunDirectory
from ignite_engine.runs import recipe
from tests.campaign.resuming import Difference
from tests.campaign.runs import (
    Bench,
    Item,
    committed_in,
    compare,
    end_of,
    newest_iteration,
    reference,
    tail,
    write_config,
)
from tests.checkpointing.file_faults import can_mount, in_child, make_read_only, make_writable, mount_small_file_system

CHILD = "tests.campaign.disks:train_on_a_bad_disk"
NEVER = 10_000


def items() -> list[Item]:
    """None where mounting is not permitted; tests/checkpointing limits the size of files instead."""
    if not can_mount():
        return []
    return [
        Item(
            "disks",
            f"{fault}, {when}, {'in the background' if background else 'in the loop'}",
            partial(_run, fault, when, background),
        )
        for fault in ("full", "read-only")
        for when in ("for a while", "to the end")
        for background in (False, True)
    ]


def train_on_a_bad_disk(config: str, fault: str, begins: int, ends: int) -> int:
    """Train with the checkpoints on a small file system of this process's own, and again if the first run failed.

    The fault lasts from iteration ``begins`` to ``ends``. Leaves ``facts.json`` and ``end.json``.
    """
    folder = Path(config).parent
    checkpoints = folder / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    mount_small_file_system(checkpoints, 512)
    code, facts = in_child(lambda: _train(Path(config), checkpoints, fault, begins, ends), 120)
    if code != 0:
        return 3
    if ends == NEVER:
        facts["status"] = json.loads((folder / "run" / "summary.json").read_text())["status"]
        facts["newest"] = newest_iteration(folder)
        _repair(checkpoints, fault)
        facts["code"], _ = in_child(lambda: main(["train", config]), 120)
    (folder / "facts.json").write_text(json.dumps(facts))
    (folder / "end.json").write_text(json.dumps(end_of(folder)))
    return 0


def _train(config: Path, checkpoints: Path, fault: str, begins: int, ends: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"failed": [], "raised": None, "fault": None}
    loaded = load_config(config)
    with RunDirectory(loaded.directory).logging_to(0):
        run = recipe.build_run(loaded)
        trainer = run.trainer

        def wait_until(reached: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 30
            while not reached():
                assert time.monotonic() < deadline, "the saves before the fault were not finished"
                time.sleep(0.01)

        def saved() -> None:  # in the background it is announced at the next step boundary, and older ones are deleted
            wait_until(lambda: newest_iteration(config.parent) == (begins - 1) // 3 * 3)

        def begin() -> None:
            wait_until(lambda: len(committed_in(config.parent)) <= 2)  # a deletion would make room again
            facts["fault"] = _break(checkpoints, fault)

        def end() -> None:
            time.sleep(0.5)  # so that the background save fails before the repair
            facts["newest"] = newest_iteration(config.parent)
            _repair(checkpoints, fault)

        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=begins - 1), saved)
        trainer.add_event_handler(Events.ITERATION_STARTED(once=begins), begin)
        trainer.add_event_handler(Events.ITERATION_STARTED(once=ends), end)
        trainer.add_event_handler(
            TrainingEvents.CHECKPOINT_FAILED, lambda: facts["failed"].append(trainer.state.iteration)
        )
        try:
            run.train()
        except CheckpointError as error:
            facts["raised"] = str(error)
    return facts


def _break(checkpoints: Path, fault: str) -> str:
    """Cause the fault; returns the message of a write that fails."""
    if fault == "read-only":
        make_read_only(checkpoints)
    else:
        with open(checkpoints / "filler", "wb", buffering=0) as file:
            for size in (4096, 1):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue
    try:
        (checkpoints / "probe").write_bytes(bytes(4096))
    except OSError as error:
        return os.strerror(error.errno or 0)
    raise AssertionError("the fault did not happen")


def _repair(checkpoints: Path, fault: str) -> None:
    if fault == "read-only":
        make_writable(checkpoints)
    else:
        (checkpoints / "filler").unlink()
        (checkpoints / "probe").unlink(missing_ok=True)


def _run(fault: str, when: str, background: bool, bench: Bench) -> dict[str, Any]:
    sections = {"checkpoint": {"every": 3, "keep_last": 2, "best": None, "mode": "min", "background": background}}
    expected = reference(bench, "disks", **sections)
    folder = bench.folder / "run"
    config = write_config(folder, **sections)
    # saved at 3, 6, 9, 12, 15, 16
    begins, ends = (5, 11) if when == "for a while" else (14, NEVER)
    code = bench.servers[0].call(CHILD, str(config), fault, begins, ends, output=folder / "output.txt")
    if code != 0:
        raise Difference(f"ended with code {code}: {tail(folder)}")
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    compare(expected, json.loads((folder / "end.json").read_text()))
    log = (folder / "run" / "logs" / "rank_0.log").read_text().splitlines()
    logged = [line for line in log if " was not saved in " in line and " WARNING " in line]
    failed, newest, raised = (2, 3, False) if ends != NEVER else (2, 12, True)
    if len(facts["failed"]) != failed or facts["newest"] != newest or (facts["raised"] is not None) != raised:
        raise Difference(f"unexpected: {facts}")
    if len(logged) != failed - raised or not all(facts["fault"] in line for line in logged):
        raise Difference(f"logged: {logged}")
    return {name: facts[name] for name in ("fault", "failed", "newest")}
