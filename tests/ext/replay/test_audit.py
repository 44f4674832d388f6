"""What a folder says is trained again: an honest run passes, and each forgery is found where its segment is drawn."""

import json
import shutil

import pytest
import torch

from ignite_engine.cli import main
from ignite_engine.ext.replay import audit
from ignite_engine.ext.replay.segments import segments_of
from tests.ext.replay.forgeries import edit_log, edit_weight, train_with_another_sample
from tests.ext.replay.runs import trained
from tests.kit.tiny import on_two_ranks


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit") / "run"
    trained(folder, 32, logging={"every": {"iterations": 4}, "trail": 5, "console": False, "clearml": False})
    return folder


@pytest.mark.row("L3")
def test_honest_run_passes_and_says_what_was_covered(honest, capsys):
    assert [(part.first, part.last) for part in segments_of(honest)] == [(0, 10), (10, 20), (20, 30), (30, 32)]
    assert main(["audit", str(honest), "--segments", "9", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    assert "Replayed 4 of 4 segments, 32 of 32 iterations (100 %), drawn with seed 1." in said
    assert "missed with probability 0.00" in said
    once = audit(honest, segments=1, seed=7)
    assert once.missed == 0.75 and len(once.drawn) == 1 and once.drawn == audit(honest, segments=1, seed=7).drawn


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("forge", [edit_weight, edit_log, train_with_another_sample])
def test_forgery_is_found_where_its_segment_is_drawn(forge, part, honest, tmp_path, capsys):
    shutil.copytree(honest, tmp_path / "run")
    segment = segments_of(tmp_path / "run")[part]
    forge(tmp_path / "run", segment, seed=part)
    found = audit(tmp_path / "run", segments=4).found
    assert segment.last in {each.last for each in found}
    assert main(["audit", str(tmp_path / "run"), "--segments", "4"]) == 1
    assert str(segment) in capsys.readouterr().out


@pytest.mark.slow
def test_honest_run_that_was_stopped_went_on_and_was_made_longer_passes(tmp_path):
    sections = {"schedule": {"name": "constant", "warmup": 0}, "data": {"batch_size": 4}}
    trained(tmp_path / "run", 18, stop_at=13, **sections)
    trained(tmp_path / "run", 18, **sections)
    trained(tmp_path / "run", 24, **sections)
    result = audit(tmp_path / "run", segments=9)
    assert [(part.first, part.last) for part in result.drawn] == [(0, 10), (10, 13), (13, 18), (18, 20), (20, 24)]
    assert result.found == {}


@pytest.mark.slow
@pytest.mark.distributed
def test_sharded_run_of_two_ranks_passes_and_has_one_trail(tmp_path):
    folder = tmp_path / "run"

    def cases(rank):
        torch.set_num_threads(1)
        sections = {"task_options": {"sharded": True}, "distributed": {"strategy": "fsdp"}}
        sections |= {"ema": {"decay": None}, "logging": {"every": 4, "trail": 5, "console": False, "clearml": False}}
        trained(folder, 16, **sections)
        result = audit(folder, segments=5, seed=rank)
        return {"found": list(result.found.values()), "drawn": len(result.drawn), "seed": result.seed}

    answers = on_two_ranks(cases, tmp_path / "meeting")
    assert answers == {"found": [[], []], "drawn": [2, 2], "seed": [0, 0]}
    lines = [json.loads(line)["iteration"] for line in (folder / "trail.jsonl").read_text().splitlines()]
    assert lines == [5, 10, 15]


@pytest.mark.row("L3")
def test_damaged_checkpoint_is_named(honest, tmp_path):
    shutil.copytree(honest, tmp_path / "run")
    with (tmp_path / "run" / "checkpoints" / "iteration_00000020" / "shared.pt").open("r+b") as file:
        file.seek(2000)
        file.write(b"\0\1\2\3")
    found = {(part.first, part.last): text for part, text in audit(tmp_path / "run", segments=4).found.items()}
    assert "iteration_00000020 is damaged" in found[10, 20]
    assert "checkpoint of iteration 20 is damaged" in found[20, 30]
