"""A run on several ranks that fails: what its mirror says of it, and how long it waits for its mirror."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ignite_engine.checkpointing import CheckpointStore, SaveOptions
from ignite_engine.handlers.checkpoint.mirroring import Mirroring
from ignite_engine.mirror.followed import RUN, read_note
from ignite_engine.mirror.remote import Remote
from ignite_engine.ranks import agreement
from tests.checkpointing.states import save
from tests.faults.fork_server import shared
from tests.faults.processes import CONFIG, summary, write_config_like
from tests.ranks import failing


@pytest.mark.distributed
@pytest.mark.faults
@pytest.mark.parametrize(("how", "rank"), [("raise", 0), pytest.param("raise", 1, marks=pytest.mark.slow), ("kill", 1)])
def test_a_mirror_says_that_its_run_has_failed_on_one_rank(tmp_path: Path, how: str, rank: int) -> None:
    sections = {
        "task_options": {"how": how, "rank": rank},
        "run": {"max_epochs": 1},
        "update": {"accumulation_steps": None},
        "checkpoint": {"mirror": str(tmp_path / "mirror"), "every": 2},
    }
    config = write_config_like({**CONFIG, "task": f"{failing.__file__}:build"}, tmp_path, sections)
    code = shared(["tests.ranks.failing"]).call(
        "tests.ranks.failing:train", str(config), 2, {}, output=tmp_path / "output.txt"
    )

    assert code == 1 and summary(tmp_path)["status"] == "failed", (tmp_path / "output.txt").read_text()
    mirror = Remote(str(tmp_path / "mirror"))
    assert read_note(mirror, RUN)["status"] == "failed" and len(mirror.names()) == 2


@pytest.mark.parametrize("silent", ["put", "write"])
def test_a_run_that_fails_on_several_ranks_waits_briefly_for_its_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """``put`` sends the files of a checkpoint, ``write`` what is said of the run."""
    mirror, goes_on = Remote(str(tmp_path / "mirror")), threading.Event()
    path = save(CheckpointStore(tmp_path / "run"), 1, size=1, run_id="a")
    mirroring = Mirroring(SaveOptions(mirror=mirror.url), tmp_path / "run")
    ending: Any = SimpleNamespace(
        state=SimpleNamespace(status="failed"),
        progress=SimpleNamespace(left=SimpleNamespace(ending=SimpleNamespace(name="FAILED"))),
    )
    mirroring.begin(ending)
    deadline = time.monotonic() + 20
    while not read_note(mirror, RUN):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    method = getattr(Remote, silent)
    monkeypatch.setattr(Remote, silent, lambda *arguments: goes_on.wait(20) and method(*arguments))
    monkeypatch.setattr(agreement, "world_size", lambda: 2)  # a collective would wait for the other one
    mirroring._offer(path)

    began = time.monotonic()
    mirroring.end(ending)
    assert time.monotonic() - began < 5.5
    assert read_note(mirror, RUN)["status"] == ("failed" if silent == "put" else "running")
    goes_on.set()
