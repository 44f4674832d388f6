"""The machine is gone: which checkpoint a resume brings from the mirror, and what it does with one that is damaged."""

import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from ignite.engine import Events

from ignite_engine.errors import CheckpointError
from ignite_engine.handlers import Checkpoint
from ignite_engine.runs.config import ConfigError
from tests.ext.mirror import faulty
from tests.ext.mirror.runs import there, train
from tests.ext.recovery.deaths import Death
from tests.ext.recovery.runs import KILLED, once, starts, whole
from tests.kit.fitting import fitted
from tests.kit.processes import wait_until
from tests.kit.refusals import command, refusals
from tests.kit.tiny import trainer_of, weights

SHARED, RANK, MANIFEST = "shared.safetensors", "rank_0.safetensors", "manifest.json"


@pytest.fixture
def store():
    return faulty.install()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A mirror with the checkpoints 2 and 4 of one run."""
    folder = tmp_path_factory.mktemp("saved")
    train(folder / "run", str(folder / "mirror"))
    return folder / "mirror"


@pytest.fixture
def mirror(saved, tmp_path):
    """A copy of it, of which what it is given is damaged."""
    shutil.copytree(saved, tmp_path / "mirror")
    return tmp_path / "mirror"


@pytest.mark.row("M1")
@pytest.mark.parametrize("place", ["{}", "memory:/{}", "faulty://{}"])
def test_a_run_whose_folder_is_gone_ends_with_the_bits_of_the_undisturbed_one(tmp_path, place, store):
    mirror, folder = place.format(tmp_path / "mirror"), tmp_path / "run"
    expected, _ = train(tmp_path / "whole", None, 12)
    train(folder, mirror, 7)
    shutil.rmtree(folder)
    trainer, resumed = train(folder, mirror, 12)

    assert resumed == "iteration_00000007"
    assert torch.equal(weights(trainer), weights(expected))
    command("checkpoints", "pull", mirror, tmp_path / "pulled")
    assert there(tmp_path / "pulled") == [12]
    if place != "memory:/{}":
        assert there(tmp_path / "mirror") == [10, 12], "as many as the run keeps"


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.nightly
def test_ranks_whose_folder_is_gone_end_with_the_bits_of_the_undisturbed_run(tmp_path, layout):
    mirror, folder = tmp_path / "mirror", tmp_path / "run"
    options = {"memory": None, "mirror": str(mirror), "save_every": 6}

    def uploaded():
        wait_until(lambda: list(mirror.glob("iteration_*6/manifest.json")))

    def prepare(trainer, checkpoint):
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=11), uploaded)

    expected = whole(tmp_path / "whole", layout, memory=None)
    deaths = [Death(11), Death(11, rank=1)]
    assert set(once(folder, deaths, layout, prepare=prepare, **options)) == {KILLED}
    shutil.rmtree(folder)
    found = whole(folder, layout, **options)

    assert starts(folder) == [6] == starts(folder, 1)
    assert [each["weights"] for each in found] == [each["weights"] for each in expected]


# ------------------------------------------------------------------------------------------ what is there, and whole


def newest(mirror, name):
    return mirror / "iteration_00000004" / name


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def forge(path):
    shutil.copy(path.parent.parent / "iteration_00000002" / path.name, path)


def lead_elsewhere(path):
    path.write_text(path.read_text().replace(SHARED, "../../x.pt"))


DAMAGES = [(damage, name) for damage in (flip, cut, forge, Path.unlink) for name in (SHARED, RANK)]
DAMAGES += [(lambda path: path.write_bytes(b"{"), MANIFEST), (lambda path: path.write_bytes(b""), MANIFEST)]
DAMAGES += [(lambda path: path.write_bytes(b'{"format_version": 6}'), MANIFEST), (lead_elsewhere, MANIFEST)]


@pytest.mark.parametrize(("damage", "name"), DAMAGES)
def test_a_damaged_one_is_skipped_in_one_line_and_the_one_before_is_taken(tmp_path, mirror, damage, name, caplog):
    damage(newest(mirror, name))
    assert train(tmp_path / "here", str(mirror))[1] == "iteration_00000002"

    skipped = [record.message for record in caplog.records if "is skipped" in record.message]
    assert len(skipped) == 1 and "iteration_00000004" in skipped[0]
    assert not (tmp_path / "x.pt").exists()


def test_one_without_a_manifest_does_not_exist(tmp_path, mirror, caplog):
    newest(mirror, MANIFEST).unlink()
    assert train(tmp_path / "here", str(mirror), 2)[1] == "iteration_00000002"
    assert "is skipped" not in caplog.text


def test_only_what_is_newer_here_or_damaged_is_fetched_and_of_the_same_run(tmp_path, mirror, caplog):
    caplog.set_level(logging.WARNING)
    here = tmp_path / "here"
    for prepare, resumed, fetched in (
        (lambda: shutil.copytree(mirror / "iteration_00000002", here / "iteration_00000002"), 4, [4]),
        (lambda: None, 4, []),
        (lambda: flip(here / "iteration_00000004" / RANK), 4, [4]),
        (lambda: (shutil.rmtree(here), train(here, None, 3, lr=0.2)), 3, []),  # another run
    ):
        prepare()
        caplog.clear()
        assert train(here, str(mirror))[1] == f"iteration_{resumed:08d}"
        lines = [line for line in caplog.messages if line.startswith("Fetched")]
        assert [int(line.split()[1].removeprefix("iteration_")) for line in lines] == fetched


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_one_is_fetched_with_the_newest(tmp_path, mode):
    scores = {2: 0.5, 4: 0.1, 6: 0.9, 8: 0.3}

    def measure(trainer):
        def write():
            trainer.state.metrics["score"] = scores[trainer.state.iteration]

        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), write)

    options = {"keep_last": 1, "best": "score", "mode": mode, "attach": measure}
    train(tmp_path / "run", str(tmp_path / "mirror"), 8, **options)
    train(tmp_path / "here", str(tmp_path / "mirror"), 8, **options)
    assert there(tmp_path / "here") == there(tmp_path / "mirror") == [4 if mode == "min" else 6, 8]


def test_no_clock_says_which_one_of_a_run_is_the_newest(tmp_path, monkeypatch):
    for iterations, now in ((2, 2e9), (4, 1e9)):  # saved on machines whose clocks are wrong
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda now=now: now)
            train(tmp_path / "run", str(tmp_path / "mirror"), iterations)
    for path in (tmp_path / "mirror" / "iteration_00000002").iterdir():
        os.utime(path, (2e9, 2e9))
    for _ in range(2):
        assert train(tmp_path / "here", str(tmp_path / "mirror"))[1] == "iteration_00000004"
        shutil.rmtree(tmp_path / "here" / "iteration_00000004", ignore_errors=True)


# ------------------------------------------------------------------------------------------------------- refusals


def unreachable(operation, name):
    raise PermissionError("Forbidden: https://the-key:the-secret@host/x?Signature=the-secret")


def test_an_empty_folder_and_a_mirror_that_cannot_be_read_is_refused_and_then_goes_on(tmp_path, mirror, store):
    for fault in (unreachable, lambda operation, name: name.endswith(SHARED) and unreachable(operation, name)):
        store.fault = fault
        with pytest.raises(CheckpointError) as raised:
            train(tmp_path / "here", f"faulty://{mirror}")
        assert "start over" in str(raised.value) and "https://***@host/x***" in str(raised.value)
        assert "\n" not in str(raised.value) and "the-secret" not in str(raised.value)
    store.fault = lambda operation, name: None
    assert train(tmp_path / "here", f"faulty://{mirror}")[1] == "iteration_00000004"


def all_damaged(folder):
    train(folder / "run", str(folder / "mirror"))
    for path in (folder / "mirror").glob("*/shared.safetensors"):
        flip(path)
    train(folder / "here", str(folder / "mirror"))


def config(mirror):
    return fitted("never made", Checkpoint={"mirror": mirror})


def within(folder):
    Checkpoint(folder / "run", mirror=str(folder / "run" / "mirror")).attach(trainer_of())


test_refusals = refusals(
    [
        ("all are damaged", all_damaged, CheckpointError, "None of 2 valid"),
        ("a number", lambda folder: Checkpoint(folder, mirror=3), TypeError, "mirror directory URL 3"),
        ("no place", lambda folder: Checkpoint(folder, mirror=""), ValueError, "mirror directory got ''"),
        ("no bucket", lambda folder: Checkpoint(folder, mirror="s3://"), ValueError, "mirror bucket"),
        ("one slash", lambda folder: Checkpoint(folder, mirror="s3:/b/run"), ValueError, "mirror s3://"),
        ("unknown", lambda folder: Checkpoint(folder, mirror="x9://b/run"), ValueError, "x9 cannot be used"),
        ("in the folder", within, ValueError, "folder itself another place"),
        ("in a config", lambda: config({"url": "x"}), ConfigError, "handlers.Checkpoint.mirror"),
    ]
)


@pytest.mark.parametrize(
    "url",
    ["s3://the-key:the-secret@b/run", "https://h/r?X-Amz-Signature=the-secret", "simplecache::s3://k:the-secret@b"],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(tmp_path, url):
    for call, error in ((lambda: Checkpoint(tmp_path, mirror=url), ValueError), (lambda: config(url), ConfigError)):
        with pytest.raises(error) as raised:
            call()
        assert "credentials" in str(raised.value) and "the-secret" not in str(raised.value)
