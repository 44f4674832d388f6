"""Any iteration of a run again: the same bits, nothing written, and what is not as it was logged is found."""

import json
import multiprocessing
import pdb

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events

from ignite_engine import Windows, fit, handlers, loader
from ignite_engine.errors import ReplayError
from ignite_engine.ext.replay import RunDiffers, bring_to, replay
from tests.ext.replay.runs import config, content, edit_lines, script, scripted, trained
from tests.kit import runs
from tests.kit.processes import ranks
from tests.kit.refusals import CommandRefused, command, refusals
from tests.kit.tiers import tiered
from tests.kit.tiny import Numbers, linear, mse, numbers_loader, one, trainer_of

VARIANTS = {
    "all of it": {},
    "plateau, stopped early": {
        "schedule": {"name": "plateau", "metric": "val/accuracy", "patience": 1, "warmup": 0},
        "early_stopping": {"metric": "val/accuracy", "patience": 3},
    },
}


@pytest.mark.parametrize("sections", VARIANTS.values(), ids=list(VARIANTS))
def test_replayed_state_is_the_checkpoint_that_the_run_has_saved_there(sections, tmp_path):
    run = trained(tmp_path / "run", 30, **sections)
    before = content(run)
    found = sorted((run / "checkpoints").iterdir())
    for checkpoint in (found[1], found[-1]):
        iteration = int(checkpoint.name.removeprefix("iteration_"))
        with bring_to(run, at=iteration, save=tmp_path / "again") as moment:
            assert moment.difference is None and moment.compared > 0
            assert 0 < moment.replayed < iteration and moment.began_at is not None
        command("checkpoints", "diff", checkpoint, tmp_path / "again" / checkpoint.name)
    assert content(run) == before


@pytest.mark.row("L1")
def test_every_iteration_is_the_one_that_was_trained(tmp_path):
    run = trained(tmp_path / "run", 12, checkpoint={"every": {"iterations": 5}})
    ends = []
    for iteration in (1, 5, 6, 12):
        with replay(run, at=iteration) as trainer:
            assert trainer.state.iteration == iteration
            if iteration < 12:
                trainer.run()  # it goes on from there to the end of the run
            ends.append(one(trainer.update.model).detach().clone())
    assert all(torch.equal(end, ends[-1]) for end in ends)


def test_settings_are_those_of_the_start_that_trained_the_iteration(tmp_path):
    constant = {"schedule": {"name": "constant", "warmup": 0}}
    run = trained(tmp_path / "run", 12, **constant)
    trained(run, 22, **constant, checkpoint={"every": {"iterations": 10}, "keep_last": 9, "resume": {"lr": 0.003}})
    for iteration, rate in ((11, 0.01), (12, 0.01), (13, 0.003), (21, 0.003)):
        with bring_to(run, at=iteration) as moment:
            assert moment.iterations[iteration].rates == {"lr": rate} and moment.difference is None


def test_iteration_is_described_by_its_samples_losses_and_rates(tmp_path):
    run = trained(tmp_path / "run", 8, logging={"every": {"iterations": 1}})
    with bring_to(run, at=3, until=7) as moment:
        described = moment.iterations
    assert list(described) == [3, 4, 5, 6, 7]
    rows = {row["iteration"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    for number, iteration in described.items():
        assert iteration.output["loss"] == rows[number]["loss"] and iteration.rates == {"lr": rows[number]["lr"]}
        assert [len(batch) for batch in iteration.samples] == [4, 4]
    first_pass = [index for number in (3, 4, 5, 6) for batch in described[number].samples for index in batch]
    assert len(set(first_pass)) == 32, "6 updates of 8 samples are an epoch, each is seen once"


# ------------------------------------------------------------------------------------ runs that no config names


def of_fit(directory):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    return fit(model, mse, Numbers(20), directory=directory, max_epochs=4, batch_size=4, logging={"every": 1})


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
def test_run_of_a_script_is_built_by_its_function(what, tmp_path):
    build, last = BUILDS[what]
    built = build(tmp_path)
    if what == "fit":
        trainer = built.trainer
    else:
        trainer, arguments = built
        trainer.run(**arguments)
        del arguments
    expected, before = one(trainer.update.model).detach().clone(), content(tmp_path)
    del trainer, built
    living = set(multiprocessing.active_children())
    with bring_to(tmp_path, build, at=last) as moment:
        assert moment.difference is None and moment.replayed < last
        assert torch.equal(one(moment.trainer.update.model), expected)
    del moment
    assert set(multiprocessing.active_children()) <= living
    assert content(tmp_path) == before


# ----------------------------------------------------------------------------------- what is not as it was logged


def test_value_that_was_not_logged_so_is_one_line_and_code_1(tmp_path):
    run = trained(tmp_path / "run", 20)

    def edit(lines):
        next(line for line in lines if line["iteration"] == 15)["loss"] += 1e-12

    edit_lines(run / "metrics.jsonl", edit)
    with pytest.raises(RunDiffers, match="iteration 15 loss") as raised, replay(run, at=18):
        pass
    assert raised.value.difference.iteration == 15
    with pytest.raises(AssertionError, match=r"code 1: .*iteration 15 loss"):
        command("replay", run, "--at", 18)
    command("replay", run, "--at", 14)


def test_trail_is_compared_too(tmp_path):
    run = trained(tmp_path / "run", 20, logging={"every": None, "trail": 4})
    with bring_to(run, at=20, before=1) as moment:
        assert moment.difference is None and moment.compared > 5

    def edit(lines):
        assert [line["iteration"] for line in lines] == [4, 8, 12, 16, 20]
        lines[2]["weights"]["4.bias"] = "0" * 16

    edit_lines(run / "trail.jsonl", edit)
    with pytest.raises(RunDiffers, match=r"iteration 12 .* 4\.bias"), replay(run, at=14):
        pass


def test_command_calls_and_saves_and_opens_the_debugger(tmp_path, monkeypatch):
    run = trained(tmp_path / "run", 12)
    (tmp_path / "look.py").write_text("def look(trainer):\n    print('looked at', trainer.state.iteration)\n")
    opened = []
    monkeypatch.setattr(pdb, "set_trace", lambda: opened.append(True))
    words = ["--call", f"{tmp_path / 'look.py'}:look", "--debug", "--save", tmp_path / "saved"]
    said = command("replay", run, "--at", 11, *words)
    assert "Replayed 1 iteration from iteration_00000010" in said and "looked at 11" in said and opened == [True]
    assert (tmp_path / "saved" / "iteration_00000011").is_dir()


def replayed(*words):
    return lambda folder: command("replay", trained(folder / "run", 6), *words)


def of_fit_without_its_function(folder):
    of_fit(folder)
    with replay(folder, at=3):
        pass


test_refusals = refusals(
    [
        ("no run", lambda folder: command("replay", folder / "nowhere", "--at", 3), CommandRefused, "nowhere exist"),
        ("too late", replayed("--at", 9), CommandRefused, "6 iterations got 9"),
        ("backwards", replayed("--at", 4, "--until", 3), CommandRefused, "iterations 4 to 3"),
        ("no file to call", replayed("--at", 3, "--call", "missing.py:f"), CommandRefused, "no such file"),
        ("no file to build", replayed("--at", 3, "--build", "missing.py:f"), CommandRefused, "no such file"),
        ("a run of fit", of_fit_without_its_function, ReplayError, "made by fit"),
    ]
)


def test_random_numbers_and_threads_are_as_before_and_a_folder_beside_the_checkpoints_is_none(tmp_path):
    run = trained(tmp_path / "run", 6)
    (run / "checkpoints" / "iteration_best_copy").mkdir()
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    with replay(run, at=3):
        assert not torch.equal(torch.get_rng_state(), numbers)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), numbers)


# ------------------------------------------------------------------------------------------- handlers, mirrors


def test_handlers_of_the_users_own_act_again_unless_they_say_no(tmp_path):
    calls = []
    counted, left_out = (lambda trainer, name=name: calls.append(name) for name in ("counted", "left out"))
    left_out.replayed = False

    def attach(trainer):
        for handler in (counted, left_out):
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), handler)

    build = scripted(attach=attach)
    trainer, arguments = build(tmp_path)
    trainer.run(**arguments)
    assert calls == ["counted", "left out"] * 10
    with bring_to(tmp_path, build, at=10):
        pass
    assert calls[20:] == ["counted"] * 3  # from iteration 5 on


def test_no_handler_of_the_engine_writes_a_file_nor_to_a_mirror(tmp_path):
    run = tmp_path / "run"

    def build(directory):
        trainer, few = trainer_of(linear(dropout=True)), Events.ITERATION_COMPLETED(every=4)
        sinks = [handlers.TensorBoardSink(directory)]
        handlers.MetricLogger(directory, sinks=sinks).attach(trainer, few)
        handlers.Export(tmp_path / "exports").attach(trainer, few)
        handlers.Profiler(directory, wait=0, warmup=1, active=2).attach(trainer)
        handlers.StepTimes().attach(trainer, few)
        handlers.MemoryLogger().attach(trainer, few)
        handlers.Throughput().attach(trainer, few)
        handlers.Progress().attach(trainer)
        handlers.SaveEvery(minutes=5).attach(trainer)
        handlers.WallClockLimit(hours=1).attach(trainer)
        handlers.StopFile(directory / "stop").attach(trainer)
        handlers.DigestTrail(directory, every=3).attach(trainer)
        places = {"mirror": str(tmp_path / "mirror"), "memory": 1}
        handlers.Checkpoint(directory / "checkpoints", **places).attach(trainer)
        return trainer, {"data": numbers_loader(shuffle=True), "max_epochs": 3}

    trainer, arguments = build(run)
    trainer.run(**arguments)
    before = content(tmp_path)
    names = {"exports", "mirror", "run/tensorboard", "run/trail.jsonl", "run/history.jsonl"}
    assert all(any(path.startswith(name) for path in before) for name in names)
    with bring_to(run, build, at=18, before=1) as moment:
        assert moment.difference is None and moment.replayed == 18
    assert content(tmp_path) == before


# --------------------------------------------------------------------------------------------------- several ranks


def test_rank_invariant_run_of_two_ranks_is_replayed_on_two_and_on_one(tmp_path):
    build = scripted(invariant=True, data=lambda: loader(Numbers(26), 3, shuffle=True, seed=4))

    def cases(rank):
        trainer, arguments = build(tmp_path)
        trainer.run(**arguments)
        if rank == 0:  # as a run of a config has them
            (tmp_path / "environment.json").write_text('{"world_size": 2}')
            (tmp_path / "config.yaml").write_text("update: {accumulate: rank_invariant}\n")
        dist.barrier()
        right = []
        for number in (2, 3, 5, 12):  # of which 3 and 12 have one micro-batch for both ranks
            with bring_to(tmp_path, build, at=number) as moment:
                right.append(moment.difference is None)
        return right, one(moment.trainer.update.model).tolist()

    (right, weights), (others, _) = ranks(2, cases)
    assert right == others == [True] * 4
    with bring_to(tmp_path, build, at=12) as moment:
        assert moment.difference is None and moment.replayed == 3
        assert one(moment.trainer.update.model).tolist() == weights


@pytest.mark.nightly
def test_two_ranks_come_back_together_and_one_does_not_come_back_alone(tmp_path):
    config(tmp_path / "run", 10, distributed={"nproc_per_node": 2}, checkpoint={"every": {"iterations": 5}})
    two = ("--nproc-per-node", 2)
    train = runs.command(tmp_path, "train", "run.yaml")
    assert train.wait() == 0, train.said()
    done = runs.command(tmp_path, "replay", "run", "--at", 10, *two)
    assert done.wait() == 0 and "Replayed 5 iterations from iteration_00000005" in done.said(), done.said()
    assert done.said().count("iteration 10, epoch") == 1 and "samples of rank 1" in done.said()
    with pytest.raises(ReplayError, match="2 ranks"), replay(tmp_path / "run", at=10):
        pass
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"lr": 0.0', '"lr": 0.1', 1))
    audited = runs.command(tmp_path, "audit", "run", "--segments", 2, *two)
    assert audited.wait() == 1 and "iterations 6 to 10: as saved and logged" in audited.said(), audited.said()
