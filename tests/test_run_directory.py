"""The files of a run's folder: whole or not there, readable by every JSON reader, held by one process."""

import errno
import json
import logging
import math
import os

import pytest
import torch

from ignite_engine.run_directory import (
    RunDirectory,
    config_differences,
    flat,
    weights_sha256,
    write_whole,
)
from tests.kit.processes import ChildFailed, child
from tests.kit.tiny import linear


def test_numbers_that_json_lacks_are_strings_that_float_reads_back(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.write_summary({"metrics": {"loss": math.nan, "peak": -math.inf, "lr": 0.1}, "times": [1, math.inf]})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    values = json.loads(directory.summary.read_text(), parse_constant=refuse)
    assert values == {"metrics": {"loss": "nan", "peak": "-inf", "lr": 0.1}, "times": [1, "inf"]}
    assert float(values["metrics"]["peak"]) == -math.inf
    assert directory.read_summary() == values


def test_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")

    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def hold(folder):
    with RunDirectory(folder).held():
        pass


def test_folder_is_held_by_one_process_until_it_ends(tmp_path):
    with RunDirectory(tmp_path).held():
        with pytest.raises(ChildFailed) as refused:
            child(hold, tmp_path)
        assert "RunDirectoryInUse" in str(refused.value) and f"process {os.getpid()} " in str(refused.value)
    child(hold, tmp_path)


def test_each_rank_logs_to_its_file_and_rank_0_to_stderr(tmp_path, capsys):
    logger = logging.getLogger("ignite_engine.some_module")
    with RunDirectory(tmp_path).logging_to(1):
        logger.info("of rank 1")
    with RunDirectory(tmp_path).logging_to(0):
        logger.info("of rank 0")
        logging.getLogger("ignite.engine").info("Engine run starting")
    logger.info("afterwards")

    assert capsys.readouterr().err == "of rank 0\n"
    assert (tmp_path / "logs" / "rank_1.log").read_text().endswith("INFO ignite_engine.some_module: of rank 1\n")
    assert "Engine run starting" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_differences_of_configs_are_by_dotted_key():
    before, now = {"run": {"seed": 0}, "a": {}}, {"run": {"seed": 1, "name": "x"}, "a": {}}

    assert config_differences(before, now) == ["run.name: not set -> x", "run.seed: 0 -> 1"]
    assert flat(now) == {"run.seed": 1, "run.name": "x", "a": {}}


def test_config_that_is_damaged_is_compared_with_nothing(tmp_path, caplog):
    directory = RunDirectory(tmp_path)
    directory.config.write_bytes(b"run: \xff\xfe")
    assert directory.differences({"run": {"seed": 1}}) == []
    assert "config.yaml cannot be compared with this run's config: 'utf-8' codec" in caplog.text


def test_digest_of_weights_depends_on_each_bit_and_not_on_the_wrapping():
    model = linear()
    digest = weights_sha256(model)

    assert weights_sha256(torch.compile(model)) == digest
    with torch.no_grad():
        model[0].bias[0] = -model[0].bias[0]
    assert weights_sha256(model) != digest


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "rank 1 exited without reporting: it was killed. Last heartbeat: iteration 3",
            "Rank 1 (process 7) was killed by SIGKILL. Last heartbeat: iteration 3",
        ),
        ("the connection was closed by a peer", "Rank 1 (process 7) was killed by SIGKILL."),
        # by its peers, as it was silent
        ("rank 1 gave no sign of life for 3.0 s. Last heartbeat: iteration 3", None),
    ],
)
def test_reason_of_a_killed_rank_keeps_what_its_peers_know(tmp_path, written, expected):
    directory = RunDirectory(tmp_path)
    directory.write_summary({"status": "failed", "reason": written})
    directory.note_failure("Rank 1 (process 7) was killed by SIGKILL.", 1, killed=True)
    assert directory.read_summary()["reason"] == (expected or written)
