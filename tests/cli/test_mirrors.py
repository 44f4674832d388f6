"""``checkpoints push`` and ``pull``, by the URL of a mirror."""

import shutil
from collections.abc import Callable

import pytest

from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.cli import main
from ignite_engine.ext.mirror.remote import Remote
from tests.checkpointing.states import holds, save

Say = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def say(capsys):
    def run_command(*words):
        capsys.readouterr()
        code = main(["checkpoints", *map(str, words)])
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).splitlines()

    return run_command


@pytest.fixture
def run(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for iteration in (100, 200):
        save(store, iteration, run_id="the run", metrics={"val/loss": iteration / 100})
    return tmp_path / "run"


@pytest.fixture
def url(tmp_path):
    return f"memory://{tmp_path.name}/mirror"


def test_what_is_pushed_is_pulled(tmp_path, run, url, say):
    here = tmp_path / "here"
    assert say("push", run, url) == (0, [f"iteration_00000200  uploaded to {url}"])
    assert say("push", run / "checkpoints" / "iteration_00000100", url)[0] == 0

    assert say("pull", url, here) == (0, [f"iteration_00000200  fetched to {here / 'iteration_00000200'}"])
    assert holds(CheckpointStore(here), here / "iteration_00000200", 200)
    assert say("pull", url, here) == (0, [f"iteration_00000200  is in {here}"])
    assert say("pull", f"{url}/iteration_00000100", here)[0] == 0
    assert [one.iteration for one in CheckpointStore(here).checkpoints()] == [100, 200]


def test_pull_takes_the_folder_of_a_run(run, url, say):
    say("push", run, url)
    shutil.rmtree(run / "checkpoints" / "iteration_00000200")

    assert say("pull", url, run)[0] == 0
    assert [one.iteration for one in CheckpointStore(run / "checkpoints").checkpoints()] == [100, 200]


def test_what_is_damaged_is_neither_pulled_nor_pushed(tmp_path, run, url, say):
    say("push", run, url)
    Remote(url).write("iteration_00000200/rank_0.pt", b"half")
    code, (line,) = say("pull", url, tmp_path / "here")
    assert code == 2 and "was not fetched: iteration_00000200/rank_0.pt has 4 bytes" in line
    assert list((tmp_path / "here").iterdir()) == []

    content = bytearray((run / "checkpoints" / "iteration_00000100" / "shared.pt").read_bytes())
    content[-1] ^= 1
    (run / "checkpoints" / "iteration_00000100" / "shared.pt").write_bytes(content)
    code, (line,) = say("push", run / "checkpoints" / "iteration_00000100", url)
    assert code == 2 and "shared.pt" in line
