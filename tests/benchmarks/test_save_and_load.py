"""The benchmark of saves and restores compares equal work: whole states, the same bits. Contents, never times."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import save_and_load
from benchmarks.background_saves import COPY, OURS
from benchmarks.save_and_load import main, measure_restores, measure_saves, restores, saves
from benchmarks.workload import Training
from ignite_engine.checkpointing import CheckpointStore

WIDTH = 16


@pytest.mark.long  # 20 ways in 3 rounds
def test_every_contender_has_its_turn_in_every_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    arguments = ["--rounds", "2", "--width", str(WIDTH), "--directory", str(tmp_path), "--json", str(target)]
    assert main(arguments) == 0
    report, printed = json.loads(target.read_text()), capsys.readouterr().out

    for name in ("waited", "deleting", "warm"):
        assert all(len(each) == 2 and min(each) > 0 for each in report[name].values()), name
    assert set(report["waited"]) >= {"torch.save", "torch.save, fsync", "DCP", "ours", "Ignite Checkpoint"}
    assert set(report["warm"]) == {"torch.load", "torch.load, mmap", "safetensors", "DCP", "ours"}
    assert set(report["cold"]) in ({*report["warm"]}, set())  # a file system in memory has nothing cold
    assert report["refuses_a_flipped_byte"]
    background = report["background"]
    assert all(len(each) == 2 and min(each) > 0 for each in background["stall"].values())
    assert set(background["complete"]) == set(background["stall"]) - {COPY} and OURS in background["complete"]
    assert all(
        took >= stall > 0 for took, stall in zip(background["complete"][OURS], background["stall"][OURS], strict=True)
    )
    goals = [goal["what"] for goal in report["goals"] if goal["goal"] is not None]
    assert len(goals) >= 4 and all(what in printed for what in goals)
    assert list(tmp_path.iterdir()) == [target]


def test_a_save_that_writes_less_than_the_state_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(WIDTH)

    def half(folder: Path) -> Callable[[], object]:
        return lambda: torch.save(training.model.state_dict(), folder / "state.pt")

    monkeypatch.setattr(save_and_load, "saves", lambda training: {"half": half})
    with pytest.raises(RuntimeError, match=r"half wrote \d+ bytes of a state of"):
        measure_saves(training, 1, tmp_path)


def test_a_restore_of_something_else_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(WIDTH)

    def forgetful(folder: Path) -> Callable[[], object]:
        def restore() -> None:
            state: dict[str, Any] = torch.load(folder / "state.pt")
            state["optimizer"]["state"][0]["exp_avg"][0, 0] += 1
            training.load(state)

        return restore

    monkeypatch.setattr(save_and_load, "restores", lambda training: {"it": ("torch.save", forgetful)})
    with pytest.raises(RuntimeError, match="it restored something else"):
        measure_restores(training, 1, tmp_path)


def test_a_restore_that_verifies_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(WIDTH)

    def unverified(folder: Path) -> Callable[[], object]:
        store = CheckpointStore(folder / "checkpoints")
        return lambda: store.checkpoints()[-1].path

    monkeypatch.setattr(save_and_load, "restores", lambda training: {"ours": ("ours", unverified)})
    assert not save_and_load.refuses_a_flipped_byte(training, tmp_path)


def test_a_cold_restore_finds_nothing_in_memory(tmp_path: Path) -> None:
    training = Training(256)
    saves(training)["torch.save, fsync"](tmp_path)()
    load = restores(training)["torch.load"][1](tmp_path)
    path = tmp_path / "state.pt"
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_in_memory(path):
        pytest.skip("this file system keeps files in memory")
    load()
    seen = [is_in_memory(path)]
    for evict in (False, True):
        save_and_load.synchronize(path, evict=evict)
        seen.append(is_in_memory(path))
    assert seen == [True, True, False] and save_and_load.evicts(tmp_path)


def is_in_memory(path: Path) -> bool:
    with open(path, "rb", buffering=0) as file:
        try:
            return bool(os.preadv(file.fileno(), [bytearray(1)], 1 << 20, os.RWF_NOWAIT))
        except BlockingIOError:
            return False
        except OSError:
            pytest.skip("this file system does not say what is in memory")
