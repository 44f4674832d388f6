"""Checkpoints that are damaged, hostile or of another version, before a run is resumed: passed over, and said so."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing import read_manifest
from ignite_engine.checkpointing.filesystem import hash_file
from tests.campaign.restarts import TRAIN
from tests.campaign.resuming import Difference
from tests.campaign.runs import (
    Bench,
    Item,
    committed_in,
    names_in,
    reference,
    resume_and_compare,
    tail,
    train,
    write_config,
)
from tests.checkpointing import test_damage


def edit_the_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    edited = path.read_text().replace('"healthy": true', '"healthy": false')
    assert edited != path.read_text()
    path.write_text(edited)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": test_damage.truncate,
    "a flipped byte": test_damage.flip_a_byte,
    "a missing file": test_damage.remove_a_file,
    "no manifest": test_damage.remove_the_manifest,
    "a torn manifest": test_damage.break_the_manifest,
    "an edited manifest": edit_the_manifest,
    "a newer format": test_damage.make_it_newer,
    "an older format": test_damage.make_it_older,
}

SECTIONS = {"checkpoint": {"every": 3, "keep_last": 2, "best": None, "mode": "min"}}


def items() -> list[Item]:
    made = [Item("damage", f"newest: {kind}", partial(_run, damage, 1)) for kind, damage in DAMAGES.items()]
    made.append(Item("damage", "all: truncated", _run_all_damaged))
    for plant in (test_damage.zip_with_code, test_damage.plain_pickle_with_code):
        made.append(Item("damage", f"newest: {plant.__name__.replace('_', ' ')}", partial(_run_hostile, plant)))
    return made


def _run(damage: Callable[[Path], object], count: int, bench: Bench) -> dict[str, Any]:
    """Damage the ``count`` newest checkpoints of a killed run; it resumes from the one before."""
    expected = reference(bench, "damage", **SECTIONS)
    folder = bench.folder / "run"
    config = _killed(bench, folder)
    before = committed_in(folder)
    for name in before[-count:]:
        damage(folder / "run" / "checkpoints" / name)
    resume_and_compare(bench, config, expected)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    expected_from = before[-1 - count] if len(before) > count else None
    log = (folder / "run" / "logs" / "rank_0.log").read_text().splitlines()
    logged = [line.split("checkpointing.store: ")[-1] for line in log if "is skipped: " in line]
    if summary["resumed_from"] != expected_from or len(logged) != count:
        raise Difference(f"resumed from {summary['resumed_from']}, said: {logged}")
    return {"resumed_from": expected_from, "said": [line.split("is skipped: ")[1][:120] for line in logged]}


def _run_all_damaged(bench: Bench) -> dict[str, Any]:
    """A run all of whose checkpoints are damaged is refused; with the folder moved away it starts over."""
    expected = reference(bench, "damage", **SECTIONS)
    folder = bench.folder / "run"
    config = _killed(bench, folder)
    checkpoints = folder / "run" / "checkpoints"
    for name in committed_in(folder):
        test_damage.truncate(checkpoints / name)
    code = train(bench, config, server=1)
    said = [line for line in (folder / "output.txt").read_text().splitlines() if " is valid " in line]
    if code != 1 or len(said) != 1:
        raise Difference(f"code {code}, said: {said}")
    checkpoints.rename(folder / "damaged")
    resume_and_compare(bench, config, expected)
    return {"refused": said[0][:120]}


def _run_hostile(plant: Callable[[Path, Path], None], bench: Bench) -> dict[str, Any]:
    """Code in a pickle whose hash is right; it must not run."""
    proof = bench.folder / "the code ran"

    def damage(checkpoint: Path) -> None:
        plant(checkpoint / "shared.pt", proof)
        with open(checkpoint / "shared.pt", "rb") as file:
            record = hash_file(file)
        manifest = read_manifest(checkpoint)
        changed = replace(manifest, files={**manifest.files, "shared.pt": record})
        (checkpoint / "manifest.json").write_bytes(changed.to_json())

    facts = _run(damage, 1, bench)
    if proof.exists():
        raise Difference("code in a pickle was executed")
    return facts


def _killed(bench: Bench, folder: Path) -> Path:
    """The config of a run that was killed at iteration 14 and has two checkpoints."""
    config = write_config(folder, **SECTIONS)
    code = bench.servers[0].call(TRAIN, str(config), "kill", 14, output=folder / "output.txt")
    if code != -signal.SIGKILL or committed_in(folder) != ["iteration_00000009", "iteration_00000012"]:
        raise Difference(f"not killed as intended: code {code}, {names_in(folder)}; {tail(folder)}")
    return config
