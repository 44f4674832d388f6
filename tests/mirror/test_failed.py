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
    mirror = Remote(str(tmp_path / "mirror"))
    fail(tmp_path, {"url": mirror.url}, how=how, rank=rank)
    assert read_note(mirror, RUN)["status"] == "failed" and len(mirror.names()) == 2


def fail(folder: Path, mirror: dict[str, Any], **options: Any) -> float:
    """A run on two ranks of which one fails; seconds from then on until all have ended."""
    sections = {
        "task_options": {**options, "notes": str(folder)},
        "run": {"max_epochs": 1},
        "update": {"accumulation_steps": None},
        "checkpoint": {"mirror": mirror, "every": 2},
    }
    config = write_config_like({**CONFIG, "task": f"{failing.__file__}:build"}, folder, sections)
    child = shared(["tests.ranks.failing"]).start(
        "tests.ranks.failing:train", str(config), 2, {}, output=folder / "output.txt"
    )
    code = child.wait(60.0)
    assert code == 1 and summary(folder)["status"] == "failed", (folder / "output.txt").read_text()
    return time.time() - (folder / "failed").stat().st_mtime


@pytest.mark.distributed
@pytest.mark.faults
def test_a_process_ends_though_an_upload_that_is_given_up_goes_on(tmp_path: Path) -> None:
    """Threads that send several files are not waited for: a silent store would keep the process."""
    mirror = Remote(str(tmp_path / "mirror"))
    assert fail(tmp_path, {"url": mirror.url, "max_mib_per_s": 1e-4}, how="kill") < 15
    assert read_note(mirror, RUN)["status"] == "failed" and mirror.checkpoints()[0] == []


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
