"""A folder, trained again in segments, and two runs that should be equal: what differs is found, and named."""

import json
import math
import shutil

import pytest

from ignite_engine.errors import ReplayError
from ignite_engine.ext.replay import audit, bring_to, compare_runs
from tests.ext.replay.runs import edit_lines, trained
from tests.kit.processes import ranks
from tests.kit.refusals import CommandRefused, command, refusals
from tests.kit.saved import checkpoint

LOGGED = {"every": {"iterations": 4}, "trail": 5}
CONSTANT = {"schedule": {"name": "constant", "warmup": 0}}


def spans(segments):
    return [(part.first, part.last) for part in segments]


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("audit") / "run", 32, logging=LOGGED)


@pytest.fixture
def forged(honest, tmp_path):
    """A copy of the honest run."""
    shutil.copytree(honest, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.row("L3")
def test_honest_run_passes_and_says_what_was_covered(honest):
    said = command("audit", honest, "--segments", 9, "--seed", 1)
    assert "4 of 4 segments, 32 of 32 iterations" in said and "probability 0.00" in said
    assert spans(audit(honest, segments=9).drawn) == [(0, 10), (10, 20), (20, 30), (30, 32)]
    once = audit(honest, segments=1, seed=7)
    assert once.missed == 0.75 and len(once.drawn) == 1 and once.drawn == audit(honest, segments=1, seed=7).drawn


def edit_a_weight(run, planted):
    """One unit in the last place of one weight, in a checkpoint with the right hashes; nothing else."""
    other = planted({"weight": 20})
    shutil.rmtree(checkpoint(run / "checkpoints", 20))
    shutil.copytree(checkpoint(other / "checkpoints", 20), checkpoint(run / "checkpoints", 20))


def edit_the_log(run, planted):
    def edit(lines):
        line = next(line for line in lines if line["iteration"] == 16)
        line["loss"] = math.nextafter(line["loss"], math.inf)

    edit_lines(run / "metrics.jsonl", edit)


@pytest.mark.row("L3")
@pytest.mark.parametrize("forge", [pytest.param(edit_a_weight, marks=pytest.mark.nightly), edit_the_log])
def test_forgery_is_found_where_its_segment_is_drawn(forge, forged, tmp_path):
    def planted(plant):
        return trained(tmp_path / "planted", 32, logging=LOGGED, task_options={"plant": plant})

    forge(forged, planted)
    assert (10, 20) in spans(audit(forged, segments=4).found)
    with pytest.raises(AssertionError, match="code 1"):
        command("audit", forged, "--segments", 4)


@pytest.mark.row("L3")
def test_damaged_checkpoint_is_named(forged):
    with (checkpoint(forged / "checkpoints", 20) / "shared.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"\0\1\2\3")
    found = {(part.first, part.last): text for part, text in audit(forged, segments=4).found.items()}
    assert "iteration_00000020 is damaged" in found[10, 20]
    assert "checkpoint of iteration 20 is damaged" in found[20, 30]


@pytest.mark.nightly  # test_equal_runs_have_none... replays across a stop
def test_honest_run_that_was_stopped_went_on_and_was_made_longer_passes(tmp_path):
    run = trained(tmp_path / "run", 18, task_options={"stop_at": 13}, **CONSTANT)
    trained(run, 18, **CONSTANT)
    trained(run, 24, **CONSTANT)
    result = audit(run, segments=9)
    assert spans(result.drawn) == [(0, 10), (10, 13), (13, 18), (18, 20), (20, 24)]
    assert result.found == {}


@pytest.mark.nightly  # two ranks train in FSDP, and train again
def test_sharded_run_of_two_ranks_passes_and_has_one_trail(tmp_path):
    sections = {"task_options": {"sharded": True}, "distributed": {"strategy": "fsdp"}, "logging": LOGGED}

    def cases(rank):
        trained(tmp_path / "run", 16, ema={"decay": None}, **sections)
        result = audit(tmp_path / "run", segments=5, seed=rank)
        return list(result.found.values()), len(result.drawn), result.seed

    assert ranks(2, cases) == [([], 2, 0)] * 2
    lines = (tmp_path / "run" / "trail.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [5, 10, 15]


# ---------------------------------------------------------------------------------------------------- compare-runs


@pytest.mark.parametrize(
    ("what", "iteration", "name"),
    [
        ("weight", 9, "0.weight after the step"),
        pytest.param("sample", 4, "the bytes of the batch", marks=pytest.mark.nightly),
    ],
)
def test_planted_difference_is_named_at_its_iteration(what, iteration, name, tmp_path):
    plant = {what: iteration}
    # one unit in the last place may be gone after the next step
    sections = {"logging": {"every": 5, "trail": 1 if what == "weight" else 4}}
    run = trained(tmp_path / "run", 16, **sections)
    if what == "sample":
        with bring_to(run, at=iteration, before=1) as moment:
            plant = {"sample": moment.iterations[iteration].samples[0][0]}
    other = trained(tmp_path / "other", 16, **sections, task_options={"plant": plant})

    found = compare_runs(run, other)
    assert found.sign is not None and found.piece is not None and not found.notes
    assert found.began_at is not None and found.began_at < iteration <= found.sign.iteration
    assert found.piece.iteration == iteration and name in found.piece.what, found.piece
    assert [line for line in found.settings if "task_options.plant" in line]


@pytest.mark.row("L2")
def test_equal_runs_have_none_however_often_one_was_stopped_and_a_replay_goes_across_it(tmp_path):
    logging = {"every": {"iterations": 3}, "trail": 3}
    run = trained(tmp_path / "run", 24, logging=logging)
    other = trained(tmp_path / "other", 24, logging=logging, task_options={"stop_at": 13})
    trained(other, 24, logging=logging)
    said = command("compare-runs", run, other)
    assert "Equal: 10 log lines, 8 lines of the trail, 3 checkpoints, of 24 iterations" in said
    for iteration in (13, 14):
        with bring_to(other, at=iteration) as moment:
            assert moment.difference is None


def test_settings_that_differ_come_first(tmp_path):
    run = trained(tmp_path / "run", 12)
    other = trained(tmp_path / "other", 12, optimizer={"name": "AdamW", "lr": 0.02})
    found = compare_runs(run, other)
    assert found.settings == ["config: optimizer.lr: 0.01 -> 0.02"]
    # the first update of a warm-up has rate 0 in neither
    assert (found.piece.iteration, found.piece.what) == (1, "the rate lr")
    with pytest.raises(AssertionError, match="code 1"):
        command("compare-runs", run, other)


@pytest.mark.row("L2")
def test_a_file_that_was_edited_is_said_to_be_no_replay(tmp_path):
    run, other = trained(tmp_path / "run", 12), tmp_path / "other"
    shutil.copytree(run, other)
    edit_lines(other / "metrics.jsonl", lambda lines: lines[1].update(loss=lines[1]["loss"] + 1e-9))
    found = compare_runs(run, other)
    assert (found.sign.iteration, found.sign.what) == (6, "loss")
    (note,) = found.notes
    assert found.piece is None and note.startswith(f"{other} is not") and "iteration 6" in note


test_refusals = refusals(
    [
        ("nothing in common", lambda folder: compare_runs(folder, folder), ReplayError, "no iteration both have"),
        ("no run", lambda folder: compare_runs(folder, folder / "nothing"), ReplayError, "nothing does not exist"),
        (
            "no run to audit",
            lambda folder: command("audit", folder / "nothing", "--segments", 2),
            CommandRefused,
            "no checkpoint segment",
        ),
    ]
)
