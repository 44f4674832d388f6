"""The short examples show what they say they show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import custom_handler, fine_tune, fsdp, gan, minimal, own_update, resume, several_processes
from ignite_engine import load_weights
from tests.kit.fitting import log, stop
from tests.kit.processes import ranks
from tests.kit.tiny import one, weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("example", [minimal, own_update], ids=["minimal", "own_update"])
def test_a_script_learns_and_started_again_continues(example, tmp_path):
    whole = example.main(str(tmp_path / "whole"), epochs=3)
    example.main(str(tmp_path / "cut"), epochs=2)
    resumed = example.main(str(tmp_path / "cut"), epochs=3)
    assert torch.equal(weights(resumed), weights(whole))
    rows = log(tmp_path / "whole")
    assert rows == log(tmp_path / "cut") and rows[-1]["loss"] < rows[0]["loss"]


def test_the_handler_of_ones_own_finds_the_spoiled_batches_and_is_resumed(tmp_path):
    custom_handler.main(str(tmp_path / "whole"))
    custom_handler.main(str(tmp_path / "cut"), batches=60)
    custom_handler.main(str(tmp_path / "cut"))
    jumps = [[row["loss_jumps"] for row in log(tmp_path / name)] for name in ("whole", "cut")]
    assert jumps == [[0, 1, 2, 3, 3]] * 2


def test_the_update_of_ones_own_takes_the_weights_nearby(tmp_path):
    at_0 = own_update.main(str(tmp_path / "at_0"), epochs=1, rho=0.0)
    at_some = own_update.main(str(tmp_path / "at_some"), epochs=1)
    assert not torch.equal(weights(at_0), weights(at_some))
    assert all(row["loss/nearby"] > row["loss"] for row in log(tmp_path / "at_some"))
    assert all(row["loss/nearby"] == row["loss"] for row in log(tmp_path / "at_0"))


def test_a_resumed_run_has_the_bits_of_the_whole_one(tmp_path, capsys):
    resume.main(str(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    whole, stopped, resumed = (line.rpartition(" ")[2] for line in lines[:3])
    assert whole == resumed != stopped and "the same bits" in lines[3]
    assert log(tmp_path / "whole") == log(tmp_path / "stopped")


def test_a_stopped_gan_ends_with_the_bits_of_the_whole_one(tmp_path, monkeypatch):
    make = gan.make_trainer
    last = {"stops": False}

    def watched(model):
        trainer = make(model)
        trainer.add_event_handler(gan.Events.ITERATION_COMPLETED(once=21), lambda: last["stops"] and stop(trainer))
        last["weights"] = lambda: one(model)
        return trainer

    monkeypatch.setattr(gan, "make_trainer", watched)
    digests = []
    for folder, last["stops"] in (("whole", False), ("run", True), ("run", False)):
        gan.main(str(tmp_path / folder), 40)
        digests.append(last["weights"]())
    assert torch.equal(digests[0], digests[2]) and not torch.equal(digests[0], digests[1])
    assert log(tmp_path / "whole") == log(tmp_path / "run")


@pytest.mark.nightly
def test_a_fine_tuned_network_beats_one_from_scratch(tmp_path):
    accuracies = fine_tune.main(str(tmp_path))
    assert accuracies["tuned"] > accuracies["from scratch"] + 0.1 and accuracies["tuned"] > 0.85


def test_two_ranks_train_as_one_process_and_continue(tmp_path):
    alone = several_processes.train(0, str(tmp_path / "alone"))

    def on_a_rank(rank):
        trainers = [several_processes.train(rank, str(tmp_path / "several")) for _ in range(2)]
        return [trainer.state.start.value for trainer in trainers], weights(trainers[0])

    (starts, first), (_, second) = ranks(2, on_a_rank)
    assert starts == ["fresh", "resumed"] and torch.equal(first, second)
    torch.testing.assert_close(first, weights(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_two_ranks_share_a_sharded_model_and_continue(tmp_path):
    found = ranks(2, lambda rank: [fsdp.train(rank, str(tmp_path)) for _ in range(2)])
    first, again = found[0]
    assert first == again and 0.4 * first[1] < first[0] < 0.6 * first[1]
    assert sum(each[0][0] for each in found) == first[1]  # every weight once
    model = fsdp.network()
    load_weights(model, tmp_path)
    inputs, targets = fsdp.samples().tensors
    assert (model.eval()(inputs).argmax(dim=1) == targets).float().mean() > 0.85


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_ranks_are_started_by_the_script_and_by_torchrun(launcher, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *launcher, str(ROOT / "examples" / "several_processes.py"), str(tmp_path)]
    subprocess.run(command, env=environment, timeout=180, check=True)
    assert len(log(tmp_path)) == 4


def test_the_page_of_examples_has_each_of_them():
    text = (ROOT / "docs" / "examples.md").read_text()
    assert not [path.name for path in (ROOT / "examples").glob("[!_]*.*") if f"(../examples/{path.name})" not in text]
