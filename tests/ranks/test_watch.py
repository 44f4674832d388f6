"""What fails on one rank is named on all of them, in every log and in the summary; real processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fork_server import ForkServer
from tests.faults.processes import CONFIG, group_is_gone, summary, write_config_like

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

HERE = Path(__file__).parent
HEARTBEAT = r"iteration \d+, epoch 1, after [A-Z_]+"


def config_of(folder: Path, **options: Any) -> Path:
    task = {"task": f"{HERE / 'failing.py'}:build"}
    sections = {"task_options": options, "run": {"max_epochs": 1}, "update": {"accumulation_steps": None}}
    return write_config_like({**CONFIG, **task}, folder, sections)


def logs(folder: Path) -> dict[int, str]:
    paths = (folder / "run" / "logs").glob("rank_*.log")
    return {int(path.stem.split("_")[1]): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(["tests.ranks.failing", "ignite_engine.cli", "ignite_engine.runs.recipe"]) as server:
        yield server


# how rank 1 fails, what every rank says of it, and the exit code
RAISED = [
    ("raise", rf"rank 1 failed at {HEARTBEAT}: ValueError: a sample is broken", 1),
    (
        "handler",
        r"rank 1 failed at iteration 5, epoch 1, after ITERATION_COMPLETED: KeyError: 'no such key' "
        r"\(Raised by handler Broken on ITERATION_COMPLETED\)",
        1,
    ),
    ("exit", rf"rank 1 called sys\.exit\(3\) at {HEARTBEAT}, while ranks? [02, ]+ waited for it", 3),
    ("kill", rf"rank 1 ended without a word: .* Last heartbeat: .*{HEARTBEAT}|rank 1 ended without a word", 1),
    ("stop", r"rank 1 gave no sign of life for \d\.\d s: .* Last heartbeat: ", 1),
]


@pytest.mark.parametrize(("how", "line", "code"), RAISED, ids=[each[0] for each in RAISED])
def test_every_rank_and_the_summary_name_what_failed_on_one(
    tmp_path: Path, server: ForkServer, how: str, line: str, code: int
) -> None:
    config = config_of(tmp_path, how=how)
    child = server.start(
        "tests.ranks.failing:train", str(config), 3, {"heartbeat_timeout": 1.5}, output=tmp_path / "output.txt"
    )
    ended = child.wait(60.0)
    output = (tmp_path / "output.txt").read_text()

    assert ended == code, output
    assert group_is_gone(child.pid), "a rank is left"
    assert summary(tmp_path)["status"] == "failed"
    assert re.fullmatch(f"({line}).*", summary(tmp_path)["reason"]), summary(tmp_path)["reason"]
    for rank, text in logs(tmp_path).items():
        if rank != 1:
            assert re.search(f" ERROR .*: ({line})", text), (rank, text)
    assert {0, 2} <= logs(tmp_path).keys()
    assert re.search(line, output)
