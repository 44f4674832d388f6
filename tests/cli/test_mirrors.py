"""``checkpoints list | verify | pull | push`` of a mirror, by its URL."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.cli import main
from ignite_engine.mirror.remote import Remote
from tests.checkpointing.states import holds, save

Say = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    def run_command(*words: object) -> tuple[int, list[str]]:
        capsys.readouterr()
        code = main(["checkpoints", *map(str, words)])
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).splitlines()

    return run_command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for iteration in (100, 200):
        save(store, iteration, run_id="the run", metrics={"val/loss": iteration / 100})
    return tmp_path / "run"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/mirror"


def test_what_is_pushed_is_listed_verified_and_pulled(tmp_path: Path, run: Path, url: str, say: Say) -> None:
    code, lines = say("push", run, url)
    assert code == 0 and lines[0].startswith("iteration_00000200  uploaded, 120.")
    assert say("push", "--all", run, url)[1][1] == f"iteration_00000200  is in {url}"
    assert not (run / "checkpoints" / ".mirror").exists()

    code, lines = say("list", url)
    assert code == 0 and len(lines) == 3 and "val/loss 2" in lines[2] and "last" in lines[2]
    code, lines = say("verify", url)
    assert (code, lines) == (0, ["iteration_00000100  valid", "iteration_00000200  valid"])
    assert say("verify", f"{url}/iteration_00000100") == (0, ["iteration_00000100  valid"])

    code, lines = say("pull", url, tmp_path / "here")
    assert code == 0 and lines[0].startswith("iteration_00000200  fetched, 120.")
    assert holds(CheckpointStore(tmp_path / "here"), tmp_path / "here" / "iteration_00000200", 200)
    assert say("pull", url, tmp_path / "here")[1] == [f"iteration_00000200  is in {tmp_path / 'here'}"]
    code, lines = say("pull", f"{url}/iteration_00000100", tmp_path / "here")
    assert code == 0 and [one.iteration for one in CheckpointStore(tmp_path / "here").checkpoints()] == [100, 200]


def test_pull_takes_the_folder_of_a_run(run: Path, url: str, say: Say) -> None:
    say("push", "--all", run, url)
    shutil.rmtree(run / "checkpoints" / "iteration_00000100")

    assert say("pull", "--all", url, run)[0] == 0
    assert [one.iteration for one in CheckpointStore(run / "checkpoints").checkpoints()] == [100, 200]


def test_what_is_damaged_is_named_and_is_code_1(tmp_path: Path, run: Path, url: str, say: Say) -> None:
    say("push", "--all", run, url)
    remote = Remote(url)
    remote.write("iteration_00000200/rank_0.pt", remote.read("iteration_00000200/rank_0.pt")[:-1])

    code, lines = say("verify", url)
    assert code == 1 and lines[1].startswith("iteration_00000200  damaged: iteration_00000200/rank_0.pt has ")
    code, lines = say("pull", url, tmp_path / "here")
    assert code == 1 and lines[0].startswith("iteration_00000200  damaged: ")
    assert CheckpointStore(tmp_path / "here").checkpoints() == []

    content = bytearray((run / "checkpoints" / "iteration_00000100" / "shared.pt").read_bytes())
    content[-1] ^= 1
    (run / "checkpoints" / "iteration_00000100" / "shared.pt").write_bytes(content)
    code, lines = say("push", "--all", run, url)
    assert code == 1 and lines[0].startswith("iteration_00000100  is not uploaded, damaged: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("list", "URL"), "error: URL holds no checkpoint."),
        (("pull", "URL", "here"), "error: URL holds no checkpoint."),
        (("list", "s4://bucket"), "error: s4://bucket cannot be used: Protocol not known: s4."),
        (("list", "s3://a:the-secret@bucket"), "error: mirror must hold no credentials, got s3://***@bucket: "),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(url: str, say: Say, words: tuple[str, ...], said: str) -> None:
    code, lines = say(*(word.replace("URL", url) for word in words))

    assert code == 2 and len(lines) == 1 and lines[0].startswith(said.replace("URL", url))


def test_a_checkpoint_that_is_not_there_is_one_line(tmp_path: Path, run: Path, url: str, say: Say) -> None:
    say("push", run, url)

    code, lines = say("pull", f"{url}/iteration_00000201", tmp_path / "here")

    assert code == 2 and lines == [f"error: {url} holds no iteration_00000201; did you mean 'iteration_00000200'?"]


def test_what_another_run_has_there_is_not_replaced(tmp_path: Path, run: Path, url: str, say: Say) -> None:
    say("push", run, url)
    path = save(CheckpointStore(tmp_path / "other"), 200, size=5, run_id="another run")

    assert say("push", path, url) == (
        2,
        [f"error: {url} holds iteration_00000200 of another run: push to another URL."],
    )
    assert say("verify", url) == (0, ["iteration_00000200  valid"])
    assert Remote(url).checkpoints()[0][0].manifest.run_id == "the run"
