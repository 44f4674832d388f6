"""A folder, trained again in segments, and two runs that should be equal: what differs is found, and named."""

import json
import math
import random
import shutil
from dataclasses import replace

import pytest
import torch
from ignite.engine import Events

from ignite_engine.checkpoint.manifest import MANIFEST_NAME, read_manifest
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import ReplayError
from ignite_engine.ext.replay import audit, compare, compare_runs, rerun
from tests.ext.replay.runs import edit_lines, trained
from tests.kit.processes import ranks
from tests.kit.refusals import CommandRefused, command, refusals
from tests.kit.saved import checkpoint
from tests.kit.tiers import tiered

LOGGED = {"MetricLogger": {"every": 4}, "DigestTrail": {"every": 5}}
SECOND_OF_FOUR = next(seed for seed in range(99) if random.Random(seed).sample(range(4), 1) == [1])
CONSTANT = {"schedule": {"name": "constant", "warmup": 0}}


def spans(segments):
    return [(part.first, part.last) for part in segments]


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("audit") / "run", 32, **LOGGED)


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


def edit_a_checkpoint(iteration, part, edit):
    """Another state in a checkpoint, written anew with the right hashes."""

    def forge(run):
        path, other = checkpoint(run / "checkpoints", iteration), CheckpointStore(run / "forged")
        before, loaded = read_manifest(path), other.load(path)
        edit({**loaded.shared, **loaded.local}[part])
        facts = {"config": before.config, "kinds": before.kinds, "run_id": before.run_id, "parent": before.parent}
        made = other.save(loaded.shared, loaded.local, iteration=iteration, epoch=before.epoch, **facts)
        shutil.rmtree(path)
        made.rename(path)
        (path / MANIFEST_NAME).write_bytes(replace(read_manifest(path), sequence=before.sequence).to_json())

    return forge


def edit_a_log(name, edit):
    return lambda run: edit_lines(run / f"{name}.jsonl", edit)


def nudge(tensor):
    tensor.view(-1)[0] = torch.nextafter(tensor.view(-1)[0], torch.tensor(math.inf))


def line_of(lines, iteration):
    return next(line for line in lines if line["iteration"] == iteration)


FORGERIES = {
    "a weight": edit_a_checkpoint(20, "model", lambda state: nudge(state["0.weight"])),
    "a running mean": edit_a_checkpoint(20, "model", lambda state: nudge(state["1.running_mean"])),
    "a moment": edit_a_checkpoint(20, "optimizer", lambda state: nudge(state["state"]["0.weight"]["exp_avg"])),
    "a random number": edit_a_checkpoint(20, "rng", lambda state: state["torch"].view(-1)[700:].zero_()),
    "an average": edit_a_checkpoint(20, "ema", lambda state: nudge(state["weights"]["0.weight"])),
    "the place in the data": edit_a_checkpoint(20, "data", lambda state: state.update(batch=0)),
    "a loss": edit_a_log("metrics", lambda lines: line_of(lines, 16).update(loss=0.1)),
    "a metric": edit_a_log("metrics", lambda lines: line_of(lines, 14).update({"val/accuracy": 0.9999})),
    "a line less": edit_a_log("metrics", lambda lines: lines.remove(line_of(lines, 16))),
    "a digest": edit_a_log("trail", lambda lines: line_of(lines, 15)["weights"].update({"4.bias": "0" * 16})),
}
"""Each in the segment after iteration 10, or at its end."""


@pytest.mark.row("L3")
@pytest.mark.parametrize("what", FORGERIES)
def test_forgery_is_found_where_its_segment_is_drawn(what, forged):
    FORGERIES[what](forged)
    assert spans(audit(forged, segments=1, seed=SECOND_OF_FOUR).found) == [(10, 20)]


@pytest.mark.row("L3")
def test_damaged_checkpoint_is_named(forged):
    with (checkpoint(forged / "checkpoints", 20) / "shared.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"\0\1\2\3")
    with pytest.raises(AssertionError, match="code 1"):
        command("audit", forged, "--segments", 4)
    ((segment, damage),) = audit(forged, segments=4).found.items()
    assert (segment.first, segment.last) == (10, 20) and "iteration_00000020" in str(damage)


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
    sections = {"task_options": {"sharded": True}, "distributed": {"strategy": "fsdp"}, **LOGGED}

    def cases(rank):
        trained(tmp_path / "run", 16, EMA=None, **sections)
        result = audit(tmp_path / "run", segments=5, seed=rank)
        return list(result.found.values()), len(result.drawn), result.seed

    assert ranks(2, cases) == [([], 2, 0)] * 2
    lines = (tmp_path / "run" / "trail.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [5, 10, 15]


# ---------------------------------------------------------------------------------------------------- compare-runs


NAMES = {
    "weight": "0.weight after the step",
    "mean": "1.running_mean after the step",
    "gradient": "the gradient of 4.weight",
    "moment": "the state of optimizer, state.0.weight.exp_avg",
    "rate": "the rate lr",
    "random": "the random generator torch",
    "average": "the state of ema, weights.4.bias",
    "sample": "the bytes of the batch",
}
PLANTS = {f"{what} {iteration}": (what, iteration) for iteration in (9, 4, 15) for what in NAMES}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("watched") / "run", 16, MetricLogger={"every": 5}, DigestTrail={"every": 1})


@pytest.mark.parametrize("plant", tiered(PLANTS, "weight 9", "gradient 9", "random 9", "average 9", "sample 9"))
def test_planted_difference_is_named_at_its_iteration(plant, watched, tmp_path):
    what, iteration = PLANTS[plant]
    planted = {what: iteration}
    if what == "sample":
        samples = []

        def watch(trainer):
            trainer.add_event_handler(
                Events.ITERATION_STARTED, lambda engine: samples.append(engine.progress.samples_of_group())
            )

        rerun(watched, iteration, since=0, attach=watch, folder=tmp_path / "again")
        # at the iteration where it comes first
        planted["sample"] = samples[iteration - 1][0]
        iteration = 1 + next(at for at, group in enumerate(samples) if planted["sample"] in group)
    other = trained(
        tmp_path / "other", 16, MetricLogger={"every": 5}, DigestTrail={"every": 1}, task_options={"plant": planted}
    )

    found = compare_runs(watched, other)
    assert not found.notes and found.began_at < iteration <= found.files.difference.iteration
    assert found.cause.iteration == iteration and NAMES[what] in found.cause.what, found.cause
    assert [line for line in found.settings if "task_options.plant" in line]


@pytest.mark.row("L2")
def test_equal_runs_have_none_however_often_one_was_stopped_and_a_replay_goes_across_it(tmp_path):
    logging = {"MetricLogger": {"every": 3}, "DigestTrail": {"every": 3}}
    run = trained(tmp_path / "run", 24, **logging)
    other = trained(tmp_path / "other", 24, **logging, task_options={"stop_at": 13})
    trained(other, 24, **logging)
    said = command("compare-runs", run, other)
    assert "Equal: 10 log lines, 8 lines of the trail, 3 checkpoints, of 24 iterations" in said
    for iteration in (13, 14):
        folder = rerun(other, iteration, folder=tmp_path / f"again_{iteration}")
        assert compare(other, folder, iteration).difference is None


def test_settings_that_differ_come_first(tmp_path):
    run = trained(tmp_path / "run", 12)
    other = trained(tmp_path / "other", 12, optimizer={"name": "AdamW", "lr": 0.02})
    found = compare_runs(run, other)
    assert found.settings == ["config.optimizer.lr: 0.01 -> 0.02"]
    # the first update of a warm-up has rate 0 in neither
    assert (found.cause.iteration, found.cause.what) == (1, "the rate lr")
    with pytest.raises(AssertionError, match="code 1"):
        command("compare-runs", run, other)


@pytest.mark.row("L2")
def test_a_file_that_was_edited_is_said_to_be_no_replay(tmp_path):
    run, other = trained(tmp_path / "run", 12), tmp_path / "other"
    shutil.copytree(run, other)
    edit_lines(other / "metrics.jsonl", lambda lines: lines[1].update(loss=lines[1]["loss"] + 1e-9))
    found = compare_runs(run, other)
    assert (found.files.difference.iteration, found.files.difference.what) == (6, "loss")
    (note,) = found.notes
    assert found.cause is None and note.startswith(f"{other} is not") and "iteration 6" in note


test_refusals = refusals(
    [
        ("nothing in common", lambda folder: compare_runs(folder, folder), ReplayError, "no iteration both have"),
        ("no run", lambda folder: compare_runs(folder, folder / "nothing"), ReplayError, "nothing no iteration"),
        (
            "no run to audit",
            lambda folder: command("audit", folder / "nothing", "--segments", 2),
            CommandRefused,
            "nothing does not exist",
        ),
    ]
)
