"""Any iteration of a run again: the same bits, nothing written, and what is not as it was logged is found."""

import gc
import json
import multiprocessing
import os
import pdb
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from ignite.engine import Events

import ignite_engine
from ignite_engine import Trainer, Update, Windows, loader
from ignite_engine.cli import main
from ignite_engine.errors import ReplayError
from ignite_engine.ext.replay import RunDiffers, bring_to, replay
from ignite_engine.ext.replay.rebuild import iterations_of
from ignite_engine.handlers import Checkpoint, Export, MetricLogger
from ignite_engine.run_directory import RunDirectory, weights_sha256
from tests.ext.replay.runs import TASK, settings, trained
from tests.kit.tiny import Numbers, linear, mse, on_two_ranks

ROOT = Path(__file__).resolve().parents[3]


def test_a_folder_beside_the_checkpoints_is_none_of_them(tmp_path):
    for name in ("iteration_00000007", "iteration_best_copy"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert iterations_of(tmp_path) == 7


VARIANTS = {
    "all of it": {},
    "two workers": {"data": {"batch_size": 4, "num_workers": 2}},
    "plateau, stopped early": {
        "schedule": {"name": "plateau", "metric": "val/accuracy", "patience": 1, "warmup": 0},
        "early_stopping": {"metric": "val/accuracy", "patience": 3},
    },
    "epochs, best": {
        "run": {"max_iterations": None, "max_epochs": 6},
        "evaluation": {"every": {"epochs": 1}},
        "checkpoint": {"every": {"epochs": 1}, "best": "val/accuracy", "mode": "max", "keep_best": 2},
    },
}


def content(folder):
    """Every file of a folder, with the time at which it was changed."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


@pytest.mark.slow
@pytest.mark.parametrize("sections", VARIANTS.values(), ids=list(VARIANTS))
def test_replayed_state_is_the_checkpoint_that_the_run_has_saved_there(sections, tmp_path):
    trained(tmp_path / "run", **sections)
    before = content(tmp_path / "run")
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for checkpoint in (saved[1], saved[-1]):
        iteration = int(checkpoint.name.removeprefix("iteration_"))
        with bring_to(tmp_path / "run", at=iteration, save=tmp_path / "again") as moment:
            assert moment.difference is None and moment.compared > 0
            assert 0 < moment.replayed < iteration and moment.began_at is not None
        assert main(["checkpoints", "diff", str(checkpoint), str(tmp_path / "again" / checkpoint.name)]) == 0
    assert content(tmp_path / "run") == before


@pytest.mark.row("L1")
def test_every_iteration_is_the_one_that_was_trained(tmp_path):
    run = trained(tmp_path / "run", 12, checkpoint={"every": {"iterations": 5}})
    for iteration in (1, 5, 6, 12):
        with replay(tmp_path / "run", at=iteration) as trainer:
            assert trainer.state.iteration == iteration
            if iteration < 12:
                trainer.run()  # it goes on from there to the end of the run
            assert weights_sha256(trainer.update.model) == run.summary["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_is_left(persistent, tmp_path):
    def build(directory):
        trainer, arguments = own_script(directory)
        data = loader(Numbers(20), 4, num_workers=1, persistent_workers=persistent)
        return trainer, {**arguments, "data": data}

    trainer, arguments = build(tmp_path / "run")
    trainer.run(**arguments)
    del trainer, arguments
    gc.collect()
    before = set(multiprocessing.active_children())
    with replay(tmp_path / "run", build, at=7):
        pass
    assert set(multiprocessing.active_children()) <= before


def test_random_numbers_and_threads_are_as_before(tmp_path):
    trained(tmp_path / "run", 6)
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    with replay(tmp_path / "run", at=3):
        assert not torch.equal(torch.get_rng_state(), numbers)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), numbers)


def test_iteration_is_described_by_its_samples_losses_and_rates(tmp_path):
    run = trained(tmp_path / "run", 8, logging={"every": {"iterations": 1}})
    with bring_to(tmp_path / "run", at=3, until=7) as moment:
        described = moment.iterations
    assert list(described) == [3, 4, 5, 6, 7]
    rows = {row["iteration"]: row for row in run.history}
    order = list(run.loader.sampler)  # of the pass that comes next: as long as that of the run
    for number, iteration in described.items():
        assert iteration.output["loss"] == rows[number]["loss"]
        assert iteration.rates == {"lr": rows[number]["lr"]}
        assert iteration.samples is not None and [len(batch) for batch in iteration.samples] == [4, 4]
    first_pass = [index for number in (3, 4, 5, 6) for batch in described[number].samples or [] for index in batch]
    assert len(set(first_pass)) == 32 < len(order) == 48, "6 updates of 8 samples are an epoch, each is seen once"


def test_value_that_was_not_logged_so_is_one_line_and_code_1(tmp_path, capsys):
    trained(tmp_path / "run", 20)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    edited = next(line for line in lines if line["iteration"] == 15)
    edited["loss"] += 1e-12
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    with pytest.raises(RunDiffers, match="At iteration 15 loss is") as raised, replay(tmp_path / "run", at=18):
        pass
    assert raised.value.difference.iteration == 15
    assert main(["replay", str(tmp_path / "run"), "--at", "18"]) == 1
    assert [line for line in capsys.readouterr().err.splitlines() if "error" in line] == [f"error: {raised.value}"]
    assert main(["replay", str(tmp_path / "run"), "--at", "14"]) == 0


def test_trail_is_compared_too(tmp_path):
    trained(tmp_path / "run", 20, logging={"every": None, "trail": 4, "clearml": False, "console": False})
    trail = tmp_path / "run" / "trail.jsonl"
    lines = [json.loads(line) for line in trail.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [4, 8, 12, 16, 20]
    with bring_to(tmp_path / "run", at=20, before=1) as moment:
        assert moment.difference is None and moment.compared > 5
    lines[2]["weights"]["4.bias"] = "0" * 16
    trail.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunDiffers, match=r"At iteration 12 the digest of 4\.bias is"), replay(tmp_path / "run", at=14):
        pass
    lines[2]["hash"] = "of another version"
    trail.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with bring_to(tmp_path / "run", at=20, before=1) as moment:
        assert moment.difference is None


def test_command_calls_and_saves_and_opens_the_debugger(tmp_path, capsys, monkeypatch):
    trained(tmp_path / "run", 12)
    (tmp_path / "look.py").write_text("def look(trainer):\n    print('looked at', trainer.state.iteration)\n")
    opened = []
    monkeypatch.setattr(pdb, "set_trace", lambda: opened.append(True))

    command = ["replay", str(tmp_path / "run"), "--at", "11", "--call", f"{tmp_path / 'look.py'}:look", "--debug"]
    assert main([*command, "--save", str(tmp_path / "saved")]) == 0

    said = capsys.readouterr().out
    assert "Replayed 1 iteration from iteration_00000010" in said and "looked at 11" in said and opened == [True]
    assert (tmp_path / "saved" / "iteration_00000011").is_dir()


def test_settings_are_those_of_the_start_that_trained_the_iteration(tmp_path):
    trained(tmp_path / "run", 12, schedule={"name": "constant", "warmup": 0})
    trained(
        tmp_path / "run",
        22,
        schedule={"name": "constant", "warmup": 0},
        checkpoint={"every": {"iterations": 10}, "keep_last": 9, "resume": {"lr": 0.003}},
    )
    for iteration, rate in ((11, 0.01), (12, 0.01), (13, 0.003), (21, 0.003)):
        with bring_to(tmp_path / "run", at=iteration) as moment:
            assert moment.iterations[iteration].rates == {"lr": rate} and moment.difference is None


def of_fit(directory):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    return ignite_engine.fit(
        model, mse, Numbers(20), directory=directory, max_epochs=4, batch_size=4, logging={"every": 1}
    )


def own_script(directory):
    torch.manual_seed(1)
    model = linear(dropout=True)
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
    MetricLogger(directory, console=False).attach(trainer)
    Checkpoint(directory / "checkpoints", keep_last=9).attach(trainer)
    return trainer, {"data": loader(Numbers(20), 4, shuffle=True, seed=5), "max_epochs": 4}


def train_own(directory):
    trainer, arguments = own_script(directory)
    trainer.run(**arguments)
    return weights_sha256(trainer.update.model)


@pytest.mark.row("L1")
def test_run_of_fit_is_built_by_its_function(tmp_path):
    last = of_fit(tmp_path / "run").summary["weights_sha256"]
    before = content(tmp_path / "run")
    with bring_to(tmp_path / "run", of_fit, at=20) as moment:
        assert moment.difference is None and moment.replayed == 5
        assert weights_sha256(moment.trainer.update.model) == last
    assert content(tmp_path / "run") == before
    with pytest.raises(ReplayError, match="made by fit"), replay(tmp_path / "run", at=3):
        pass


def test_run_of_a_script_is_built_by_its_function(tmp_path):
    last = train_own(tmp_path / "run")
    before = content(tmp_path / "run")
    with bring_to(tmp_path / "run", own_script, at=20) as moment:
        assert moment.difference is None and moment.compared == 5
        assert weights_sha256(moment.trainer.update.model) == last
    assert content(tmp_path / "run") == before


def test_mirror_and_exports_are_as_they_were(tmp_path):
    def build(directory):
        torch.manual_seed(1)
        model = linear()
        trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
        options = {"mirror": str(tmp_path / "mirror"), "memory": 1}
        Checkpoint(directory / "checkpoints", keep_last=9, **options).attach(trainer)
        Export(tmp_path / "exports").attach(trainer, Events.ITERATION_COMPLETED(every=3))
        return trainer, {"data": loader(Numbers(20), 4), "max_epochs": 4}

    trainer, arguments = build(tmp_path / "run")
    trainer.run(**arguments)
    before = content(tmp_path)
    assert any(name.startswith("mirror/") for name in before) and any(name.startswith("exports/") for name in before)
    with replay(tmp_path / "run", build, at=13) as again:
        assert again.state.iteration == 13
    assert content(tmp_path) == before


def test_run_of_windows_is_replayed_within_them(tmp_path):
    def build(directory):
        trainer, _ = own_script(directory)
        windows = Windows([5, 0, 9, 6], lambda count: loader(Numbers(count), 2, shuffle=True) if count else None)
        return trainer, {"data": windows, "max_epochs": 3}

    trainer, arguments = build(tmp_path / "run")
    trainer.run(**arguments)
    last = weights_sha256(trainer.update.model)
    assert trainer.state.iteration == 33
    for number in (4, 12, 33):
        with bring_to(tmp_path / "run", build, at=number) as moment:
            samples = moment.iterations[number].samples
            assert moment.difference is None and samples is not None
            window = Numbers(moment.trainer.state.window or 6)
            assert torch.equal(moment.trainer.state.batch[0], window.inputs[samples[0]])
    assert weights_sha256(moment.trainer.update.model) == last


@pytest.mark.distributed
@pytest.mark.long  # three commands, of which each starts two processes
def test_commands_on_two_ranks_agree_and_end_with_their_codes(tmp_path):
    config = settings(tmp_path / "run", 20, {"distributed": {"nproc_per_node": 2}})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))

    def command(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-m", "ignite_engine", *arguments]
        return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    assert command("train", "tiny.yaml").returncode == 0
    two = ("--nproc-per-node", "2")
    done = command("replay", "run", "--at", "20", "--save", "saved", *two)
    assert done.returncode == 0 and "Replayed 10 iterations from iteration_00000010" in done.stdout, done.stderr
    assert done.stdout.count("iteration 20, epoch") == 1 and "samples of rank 1" in done.stdout
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"lr": 0.0', '"lr": 0.1', 1))
    audited = command("audit", "run", "--segments", "2", *two)
    assert audited.returncode == 1 and "iterations 11 to 20: as saved and logged" in audited.stdout, audited.stderr
    refused = command("replay", "run", "--at", "8", "--nproc-per-node", "3")
    assert refused.returncode == 2 and "was trained on 2 ranks, and this is 3" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--at", "3"], "nowhere does not exist"),
        (["run", "--at", "9"], "run has 6 iterations, got 9"),
        (["run", "--at", "4", "--until", "3"], "got iterations 4 to 3"),
        (["run", "--at", "3", "--call", "missing.py:f"], "there is no such file"),
        (["run", "--at", "3", "--build", "missing.py:f"], "there is no such file"),
    ],
)
def test_mistakes_are_one_line_and_code_2(arguments, said, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "run":
        trained(Path("run"), 6)
    assert main(["replay", *arguments]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_task_is_found_where_the_run_has_found_it(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "tiny_task.py").write_text(Path(TASK.rpartition(":")[0]).read_text())
    (folder / "tiny.yaml").write_text(
        "task: tiny_task.py:build\nrun: {max_iterations: 4}\nlogging: {console: false, clearml: false, report: false}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ignite-engine", "train", "project/tiny.yaml"])
    assert main(["train", "project/tiny.yaml"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with replay(tmp_path / "runs" / "tiny", at=3) as trainer:
        assert trainer.state.iteration == 3


NUMBERS = Numbers(26)


def invariant_script(directory):
    torch.manual_seed(1)
    model = linear(dropout=True)
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, rank_invariant=True)
    trainer = Trainer(update, global_micro_batches=4)
    MetricLogger(directory, console=False).attach(trainer)
    Checkpoint(directory / "checkpoints", keep_last=9).attach(trainer)
    return trainer, {"data": loader(NUMBERS, 3, shuffle=True, seed=4), "max_epochs": 4}


def is_described(moment, number):
    """Whether the samples that are told are those of the batch."""
    samples, batches = moment.iterations[number].samples, moment.trainer.state.batch
    assert samples is not None
    return all(torch.equal(batch[0], NUMBERS.inputs[told]) for batch, told in zip(batches, samples, strict=True))


@pytest.mark.distributed
def test_rank_invariant_run_of_two_ranks_is_replayed_on_two_and_on_one(tmp_path):
    folder = tmp_path / "run"

    def cases(rank):
        trainer, arguments = invariant_script(folder)
        trainer.run(**arguments)
        if rank == 0:
            RunDirectory(folder).write_environment(2)
            RunDirectory(folder).write_config({"update": {"rank_invariant": True}})
        dist.barrier()
        right = []
        for number in (2, 3, 5, 12):  # of which 3 and 12 have one micro-batch for both ranks
            with bring_to(folder, invariant_script, at=number) as moment:
                right.append(is_described(moment, number) and moment.difference is None)
        return {"right": right, "weights": weights_sha256(moment.trainer.update.model)}

    answers = on_two_ranks(cases, tmp_path / "meeting")
    assert answers["right"] == [[True] * 4] * 2
    with bring_to(folder, invariant_script, at=12) as moment:
        assert is_described(moment, 12) and moment.difference is None and moment.replayed == 3
        assert answers["weights"] == [weights_sha256(moment.trainer.update.model)] * 2


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_come_back_together_and_one_does_not_come_back_alone(tmp_path):
    def cases(rank):
        torch.set_num_threads(1)
        trained(tmp_path / "run", 20)
        with bring_to(tmp_path / "run", at=20, save=tmp_path / "again") as moment:
            samples = moment.iterations[20].samples
            assert samples is not None
            return {"difference": moment.difference, "replayed": moment.replayed, "samples": samples}

    answers = on_two_ranks(cases, tmp_path / "meeting")
    assert answers["difference"] == [None, None] and answers["replayed"] == [10, 10]
    first, second = ({index for batch in samples for index in batch} for samples in answers["samples"])
    assert len(first) == len(second) == 8 and not first & second
    diff = ["checkpoints", "diff", *(str(tmp_path / f) for f in ("run/checkpoints/iteration_00000020", "again"))]
    assert main(diff) == 0
    with pytest.raises(ReplayError, match="was trained on 2 ranks, and this is 1"), replay(tmp_path / "run", at=20):
        pass
