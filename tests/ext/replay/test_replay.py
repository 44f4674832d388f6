"""Any iteration of a run again: the same bits, nothing written, and what is not as it was logged is found."""

import json
import multiprocessing
import pdb
import random
import shutil
import time

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events

from ignite_engine import Windows, every, fit, loader
from ignite_engine.errors import ReplayError
from ignite_engine.ext.replay import compare, rerun
from tests.ext.replay.runs import config, content, edit_lines, script, scripted, trained
from tests.kit import runs
from tests.kit.processes import ranks
from tests.kit.refusals import CommandRefused, command, refusals
from tests.kit.saved import checkpoint
from tests.kit.tiers import tiered
from tests.kit.tiny import Numbers, mse, one

VARIANTS = {
    "all of it": {},
    "plateau, stopped early": {
        "schedule": {"name": "plateau", "metric": "val/accuracy", "patience": 1, "warmup": ...},
        "EarlyStopping": {"key": "val/accuracy", "patience": 3},
    },
    "saved beside training": {"Checkpoint": {"background": True, "every": 10, "keep_last": 9, "save_at_end": False}},
}
WORKERS = {"data": {"batch_size": 4, "num_workers": 1}}


@pytest.fixture
def again(tmp_path):
    """Trains a run again: what there was to compare, and the first difference."""

    def call(run, at, **options):
        folder = rerun(run, at, folder=tmp_path / "again", **options)
        try:
            return compare(run, folder, at).difference
        finally:
            shutil.rmtree(folder)

    return call


@pytest.mark.parametrize("sections", VARIANTS.values(), ids=list(VARIANTS))
def test_replayed_state_is_the_checkpoint_that_the_run_has_saved_there(sections, tmp_path):
    run = trained(tmp_path / "run", 30, **sections)
    before = content(run)
    found = sorted((run / "checkpoints").iterdir())
    for saved in (found[1], found[-1]):
        iteration = int(saved.name.removeprefix("iteration_"))
        folder = rerun(run, iteration, folder=tmp_path / f"again_{iteration}")
        assert compare(run, folder, iteration).difference is None
        assert (folder / "checkpoints" / saved.name / "manifest.json").exists()
    assert content(run) == before


def replays(folder, count, sections):
    """Random iterations of a run, compared with one that saves at each of them."""
    run = trained(folder / "run", 30, **sections, DigestTrail={"every": 4})
    whole = trained(folder / "whole", 30, **{**sections, "Checkpoint": {"every": 1, "keep_last": 100}})
    differences = []
    for at in random.Random(3).sample(range(1, 31), count):
        moment = rerun(run, at, folder=folder / f"again_{at}")
        assert checkpoint(moment / "checkpoints", at).is_dir() and checkpoint(whole / "checkpoints", at).is_dir()
        differences += [compare(run, moment, at).difference, compare(whole, moment, at).difference]
    return differences


@pytest.mark.row("L1")
def test_every_iteration_is_the_one_that_was_trained(tmp_path):
    assert replays(tmp_path, 6, {}) == [None] * 12


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_twenty_random_iterations_with_workers_are_those_that_were_trained(world_size, tmp_path):
    def cases(rank):
        return replays(tmp_path, 20, WORKERS)

    assert ranks(world_size, cases, timeout_s=300.0) == [[None] * 40] * world_size


def test_settings_are_those_of_the_start_that_trained_the_iteration(again, tmp_path):
    constant = {"schedule": {"name": "constant", "warmup": 0}}
    run = trained(tmp_path / "run", 12, **constant)
    trained(run, 22, **constant, Checkpoint={"every": {"iterations": 10}, "keep_last": 9, "resume": {"lr": 0.003}})
    rates = []
    for iteration in (11, 12, 13, 21):
        assert (
            again(run, iteration, call=lambda t: rates.append(t.update.optimizers["optimizer"].param_groups[0]["lr"]))
            is None
        )
    assert rates == [0.01, 0.01, 0.003, 0.003]


def test_command_says_what_the_iteration_was(tmp_path):
    run = trained(tmp_path / "run", 8, MetricLogger={"every": 1}, DigestTrail={"every": 1})
    said = command("replay", run, "--at", 7)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    digest = json.loads((run / "trail.jsonl").read_text().splitlines()[6])["all"]
    assert row["iteration"] == 7 and "iteration 7, epoch 2" in said and f"loss: {row['loss']}" in said
    assert f"lr: {row['lr']}" in said and f"weights: {digest}" in said and "Tensor [4, 6] float32" in said
    (samples,) = [line.split()[1:] for line in said.splitlines() if "samples" in line]
    assert len(set(samples)) == 8
    assert "Equal in the run: 7 log lines, 7 lines of the trail." in said


# ------------------------------------------------------------------------------------ runs that no config names


def of_fit(directory):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    handlers = {"MetricLogger": {"every": 1}}
    return fit(model, mse, Numbers(20), directory=directory, max_epochs=4, batch_size=4, handlers=handlers)


def opened(count):
    return loader(Numbers(count), 2, shuffle=True) if count else None


BUILDS = {
    "fit": (of_fit, 20),
    "a script": (script, 20),
    "workers": (scripted(data=lambda: loader(Numbers(20), 4, num_workers=1, persistent_workers=True)), 20),
    "windows": (scripted(data=lambda: Windows([5, 0, 9, 6], opened)), 44),
}


@pytest.mark.row("L1")
# torch may wait 5 s for the end of a persistent worker
@pytest.mark.parametrize("what", tiered(BUILDS, "fit", "a script", "windows"))
def test_run_of_a_script_is_built_by_its_function(what, again, tmp_path):
    (build, last), run = BUILDS[what], tmp_path / "run"
    built = build(run)
    if what == "fit":
        trainer = built.trainer
    else:
        trainer, arguments = built
        trainer.run(**arguments)
        del arguments
    expected, before = one(trainer.update.model).detach().clone(), content(run)
    del trainer, built
    living = set(multiprocessing.active_children())
    found = []
    assert again(run, last, build=build, call=lambda trainer: found.append(one(trainer.update.model))) is None
    assert torch.equal(found[0], expected)
    assert set(multiprocessing.active_children()) <= living
    assert content(run) == before


def test_what_comes_by_a_clock_comes_where_the_run_has_logged(again, tmp_path):
    def attach(trainer):
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=3), lambda: time.sleep(0.02))

    build, run = scripted(attach=attach, log_at=every(seconds=0.02)), tmp_path / "run"
    trainer, arguments = build(run)
    trainer.run(**arguments)
    assert 2 < len((run / "metrics.jsonl").read_text().splitlines()) < 15
    assert again(run, 18, build=build) is None


# ----------------------------------------------------------------------------------- what is not as it was logged


def test_value_that_was_not_logged_so_is_one_line_and_code_1(tmp_path):
    run = trained(tmp_path / "run", 20)
    edit_lines(run / "metrics.jsonl", lambda lines: lines[6].update(loss=lines[6]["loss"] + 1e-12))
    with pytest.raises(AssertionError, match=r"code 1: .*iteration 15, log lines: loss"):
        command("replay", run, "--at", 18)
    command("replay", run, "--at", 14)


def test_command_calls_and_saves_and_opens_the_debugger(tmp_path, monkeypatch):
    run = trained(tmp_path / "run", 12)
    (tmp_path / "look.py").write_text(
        "def look(trainer):\n"
        "    gradients = [parameter.grad for parameter in trainer.update.model.parameters()]\n"
        "    print('looked at', trainer.state.iteration, len(trainer.state.batch), None in gradients)\n"
    )
    opened = []
    monkeypatch.setattr(pdb, "set_trace", lambda: opened.append(True))
    words = ["--call", f"{tmp_path / 'look.py'}:look", "--debug", "--save", tmp_path / "saved"]
    said = command("replay", run, "--at", 11, *words)
    assert "1 iterations, from iteration 10" in said and "looked at 11 2 False" in said and opened == [True]
    assert checkpoint(tmp_path / "saved" / "checkpoints", 11).is_dir()


def replayed(*words):
    return lambda folder: command("replay", trained(folder / "run", 6), *words)


def of_fit_without_its_function(folder):
    of_fit(folder)
    rerun(folder, 3)


def elsewhere(folder):
    trainer, arguments = script(folder)
    trainer.run(**arguments)
    rerun(folder, 3, build=lambda directory: script(folder))


def mirrored(folder):
    trainer, arguments = script(folder / "run", mirror=str(folder / "mirror"))
    trainer.run(**arguments)
    rerun(folder / "run", 3, build=lambda directory: script(directory, mirror=str(folder / "mirror")))


test_refusals = refusals(
    [
        ("no run", lambda folder: command("replay", folder / "nowhere", "--at", 3), CommandRefused, "nowhere exist"),
        ("too late", replayed("--at", 9), CommandRefused, "6 iterations got 9"),
        ("no file to call", replayed("--at", 3, "--call", "missing.py:f"), CommandRefused, "no such file"),
        ("no file to build", replayed("--at", 3, "--build", "missing.py:f"), CommandRefused, "no such file"),
        ("a folder that is there", replayed("--at", 3, "--save", "/tmp"), CommandRefused, "/tmp new folder"),
        ("a run of fit", of_fit_without_its_function, ReplayError, "made by fit"),
        ("in the run's folder", elsewhere, ReplayError, "build directory alone"),
        ("into its mirror", mirrored, ReplayError, "build mirror leave out"),
    ]
)


def test_random_numbers_and_threads_are_as_before_and_a_folder_beside_the_checkpoints_is_none(tmp_path):
    run = trained(tmp_path / "run", 6)
    (run / "checkpoints" / "iteration_best_copy").mkdir()
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    rerun(run, 3, folder=tmp_path / "again", call=lambda _: torch.rand(1))
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), numbers)


# ------------------------------------------------------------------------------------------- handlers, mirrors


def test_nothing_is_written_but_in_the_folder_of_the_replay(again, tmp_path):
    places = {"mirror": str(tmp_path / "mirror"), "memory": 1, "every": 10, "keep_last": 9}
    logging = {"DigestTrail": {"every": 3}, "TensorBoard": {}, "ClearML": {}}
    logging["Board"] = {"use": "TensorBoard", "directory": str(tmp_path / "board")}
    run = trained(tmp_path / "run", 18, Checkpoint=places, **logging, Profiler={"active": 2, "wait": 1})
    (run / "stop").touch()
    before = content(tmp_path)
    assert {"mirror", "board/tensorboard", "run/tensorboard", "run/trail.jsonl"} <= before.keys()
    assert again(run, 18, since=0) is None
    assert content(tmp_path) == before


# --------------------------------------------------------------------------------------------------- several ranks


def test_rank_invariant_run_of_two_ranks_is_replayed_on_two_and_on_one(again, tmp_path):
    build = scripted(invariant=True, data=lambda: loader(Numbers(26), 3, shuffle=True, seed=4))

    def cases(rank):
        trainer, arguments = build(tmp_path / "run")
        trainer.run(**arguments)
        dist.barrier()
        right = []
        for number in (2, 3, 5, 12):  # of which 3 and 12 have one micro-batch for both ranks
            folder = rerun(tmp_path / "run", number, build=build, folder=tmp_path / f"again_{number}")
            right.append(compare(tmp_path / "run", folder, number).difference)
        return right

    assert ranks(2, cases) == [[None] * 4] * 2
    assert again(tmp_path / "run", 12, build=build) is None
    with pytest.raises(ReplayError, match="12 iterations"):
        again(tmp_path / "run", 13, build=build)


@pytest.mark.nightly
def test_two_ranks_come_back_together_and_one_does_not_come_back_alone(tmp_path):
    config(tmp_path / "run", 10, distributed={"nproc_per_node": 2}, Checkpoint={"every": {"iterations": 5}})
    two = ("--nproc-per-node", 2)
    train = runs.command(tmp_path, "train", "run.yaml")
    assert train.wait() == 0, train.said()
    done = runs.command(tmp_path, "replay", "run", "--at", 10)  # on as many as the run had
    assert done.wait() == 0 and "Replayed 5 iterations, from iteration 5" in done.said(), done.said()
    assert done.said().count("iteration 10, epoch") == 1 and "samples of rank 1" in done.said()
    with pytest.raises(ReplayError, match="2 ranks"):
        rerun(tmp_path / "run", 10)
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"lr": 0.0', '"lr": 0.1', 1))
    audited = runs.command(tmp_path, "audit", "run", "--segments", 2, *two)
    assert audited.wait() == 1 and "iterations 6 to 10: as saved and logged" in audited.said(), audited.said()
