"""Two runs that should be equal: what was planted is found at its iteration and by its name."""

import json
import shutil

import pytest

from ignite_engine.cli import main
from ignite_engine.errors import ReplayError
from ignite_engine.ext.replay import bring_to, compare_runs
from tests.ext.replay.plants import PLANTS, plant
from tests.ext.replay.runs import trained

QUIET = {"every": {"iterations": 3}, "trail": 3, "console": False, "clearml": False, "report": False}


@pytest.mark.slow
@pytest.mark.parametrize("what", PLANTS)
def test_planted_difference_is_named_at_its_iteration(what, tmp_path):
    planted = plant(what, tmp_path, seed=5, iterations=24)
    found = compare_runs(tmp_path / "run", tmp_path / "other")
    assert found.sign is not None and found.piece is not None and not found.notes
    assert found.began_at is not None and found.began_at < planted.iteration <= found.sign.iteration
    assert found.piece.iteration == planted.iteration, found.piece
    assert any(name in found.piece.what for name in planted.names), found.piece
    assert [line for line in found.settings if planted.setting in line]


def test_run_that_went_on_after_its_end_is_replayed_across_it(tmp_path):
    trained(tmp_path / "run", 13, schedule={"name": "constant", "warmup": 0})
    trained(tmp_path / "run", 24, schedule={"name": "constant", "warmup": 0})
    for iteration in (13, 14):
        with bring_to(tmp_path / "run", at=iteration) as moment:
            assert moment.difference is None


@pytest.mark.row("L2")
def test_equal_runs_have_none_however_often_one_was_stopped(tmp_path, capsys):
    trained(tmp_path / "run", 24, logging=QUIET)
    trained(tmp_path / "other", 24, stop_at=13, logging=QUIET)
    trained(tmp_path / "other", 24, logging=QUIET)
    assert main(["compare-runs", str(tmp_path / "run"), str(tmp_path / "other")]) == 0
    said = capsys.readouterr().out
    assert "Equal: 10 log lines, 8 lines of the trail, 3 checkpoints, of 24 iterations" in said
    assert "Nothing that was logged or saved differs." in said


def test_settings_that_differ_come_first(tmp_path, capsys):
    trained(tmp_path / "run", 12)
    trained(tmp_path / "other", 12, optimizer={"name": "AdamW", "lr": 0.02})
    assert main(["compare-runs", str(tmp_path / "run"), str(tmp_path / "other")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "config: optimizer.lr: 0.01 -> 0.02"
    # the first update of a warm-up has rate 0 in neither
    assert said[-1].startswith("First difference: iteration 1: the rate lr")


@pytest.mark.row("L2")
def test_a_file_that_was_edited_is_said_to_be_no_replay(tmp_path):
    trained(tmp_path / "run", 12)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    log = tmp_path / "other" / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[1]["loss"] += 1e-9
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compare_runs(tmp_path / "run", tmp_path / "other")
    assert found.sign is not None and (found.sign.iteration, found.sign.what) == (6, "loss")
    (note,) = found.notes
    assert found.piece is None and note.startswith(f"{tmp_path / 'other'} is not what its config makes: At iteration 6")


def test_runs_with_nothing_in_common_are_one_line(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ReplayError, match="no iteration that both have"):
        compare_runs(tmp_path / "run", tmp_path / "run")
    with pytest.raises(ReplayError, match="nothing does not exist"):
        compare_runs(tmp_path / "run", tmp_path / "nothing")
