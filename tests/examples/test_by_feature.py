"""The short examples show what they say they show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ignite.engine import Events

from examples import custom_handler, fine_tune, fsdp, minimal, own_update, resume, several_processes
from ignite_engine import Trainer, Update, load_weights, loader
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.handlers import MetricLogger
from tests.faults.commands import Command
from tests.kit.tiny import on_two_ranks, weights

ROOT = Path(__file__).resolve().parents[2]


def logged(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def saved(directory):
    return [each.iteration for each in CheckpointStore(directory / "checkpoints").checkpoints()]


def test_minimal_learns_and_started_again_continues(tmp_path):
    whole = minimal.main(str(tmp_path / "whole"), epochs=3)
    minimal.main(str(tmp_path / "cut"), epochs=2)
    resumed = minimal.main(str(tmp_path / "cut"), epochs=3)

    assert resumed.state.start.value == "resumed" and torch.equal(weights(resumed), weights(whole))
    rows = logged(tmp_path / "whole")
    assert rows == logged(tmp_path / "cut") and rows[-1]["loss"] < 0.5 * rows[0]["loss"]


def test_custom_handler_finds_the_spoiled_batches_and_is_resumed(tmp_path):
    def jumps(directory):
        return [row["loss_jumps"] for row in logged(directory)]

    custom_handler.main(str(tmp_path / "whole"))
    custom_handler.main(str(tmp_path / "cut"), batches=60)
    custom_handler.main(str(tmp_path / "cut"))

    assert jumps(tmp_path / "whole") == [0, 1, 2, 3, 3] == jumps(tmp_path / "cut")


def test_own_update_is_that_of_the_optimizer_at_radius_0_and_is_resumed(tmp_path):
    whole = own_update.main(str(tmp_path / "whole"), epochs=3)
    own_update.main(str(tmp_path / "cut"), epochs=2)
    resumed = own_update.main(str(tmp_path / "cut"), epochs=3)
    assert resumed.state.start.value == "resumed" and torch.equal(weights(resumed), weights(whole))
    assert all(row["loss/nearby"] > row["loss"] for row in logged(tmp_path / "whole"))


def test_own_update_at_radius_0_is_an_ordinary_update(tmp_path, monkeypatch):
    at_0 = own_update.main(str(tmp_path / "at_0"), epochs=1, rho=0.0)
    at_some = own_update.main(str(tmp_path / "at_some"), epochs=1)

    def ordinary(model, optimizer, rho):
        return Update(model, optimizer, own_update.loss_fn)

    monkeypatch.setattr(own_update, "SharpnessAwareUpdate", ordinary)
    plain = own_update.main(str(tmp_path / "plain"), epochs=1)

    assert torch.equal(weights(at_0), weights(plain)) and not torch.equal(weights(at_some), weights(plain))


def test_resumed_run_has_the_bits_of_the_whole_one(tmp_path, capsys):
    resume.main(str(tmp_path))
    lines = capsys.readouterr().out.splitlines()

    whole, stopped, resumed = (line.rpartition(" ")[2] for line in lines[:3])
    assert lines[1].startswith("stopped, fresh: interrupted at 13,") and lines[2].startswith("stopped, resumed:")
    assert whole == resumed != stopped and lines[3] == "the same bits"
    assert logged(tmp_path / "whole") == logged(tmp_path / "stopped")


@pytest.mark.slow
def test_fine_tuned_network_keeps_the_body_and_beats_one_from_scratch(tmp_path):
    accuracies = fine_tune.main(str(tmp_path))

    assert accuracies["tuned"] > accuracies["from scratch"] + 0.1 and accuracies["tuned"] > 0.85


@pytest.mark.slow
def test_two_ranks_train_as_one_process_and_continue(tmp_path):
    """DDP and FSDP2, each started twice."""
    alone = several_processes.train(0, str(tmp_path / "alone"))

    def on_a_rank(rank):
        folder = str(tmp_path / "several_processes")
        trainers = [several_processes.train(rank, folder) for _ in range(2)]
        return {
            "start": [trainer.state.start.value for trainer in trainers],
            "iteration": [trainer.state.iteration for trainer in trainers],
            "weights": weights(trainers[0]).tolist(),
            "fsdp": [fsdp.train(rank, str(tmp_path / "fsdp")) for _ in range(2)],
        }

    found = on_two_ranks(on_a_rank, tmp_path / "meeting_point")

    assert found["start"] == [["fresh", "resumed"]] * 2 and found["iteration"] == [[alone.state.iteration] * 2] * 2
    assert found["weights"][0] == found["weights"][1]
    torch.testing.assert_close(torch.tensor(found["weights"][0]), weights(alone), rtol=1e-4, atol=1e-5)
    first, again = found["fsdp"][0]
    assert first == again and 0.4 * first[1] < first[0] < 0.6 * first[1]
    rows, model = logged(tmp_path / "fsdp"), fsdp.network()
    assert [row["iteration"] for row in rows] == [8, 16, 24, 32] and rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    load_weights(model, tmp_path / "fsdp")
    inputs, targets = fsdp.samples().tensors
    assert (model.eval()(inputs).argmax(dim=1) == targets).float().mean() > 0.85
    assert sum(each[0][0] for each in found["fsdp"]) == found["fsdp"][0][0][1]  # every weight once


@pytest.mark.slow
def test_fsdp_has_the_losses_of_one_process(tmp_path):
    model = fsdp.network()
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=3e-3), fsdp.loss_fn, clip_norm=1.0))
    MetricLogger(tmp_path / "plain").attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(loader(fsdp.samples(), batch_size=64, shuffle=True), max_epochs=4)

    on_two_ranks(lambda rank: {"own": fsdp.train(rank, str(tmp_path / "fsdp"))}, tmp_path / "meeting_point")
    losses = [[row["loss"] for row in logged(tmp_path / name)] for name in ("plain", "fsdp")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "launchers"),
    [("several_processes", [(), TORCHRUN]), ("fsdp", [()])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_are_started_by_the_script_and_by_torchrun(name, launchers, tmp_path):
    script, path = str(ROOT / "examples" / f"{name}.py"), os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for launcher in launchers:
        command = [sys.executable, *launcher, script, str(tmp_path / str(len(launcher)))]
        if name == "fsdp":
            example = Command(tmp_path, *command[1:], function="script")
            assert example.communicate(180) and example.returncode == 0
            continue
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=180, check=True)
    rows = [logged(tmp_path / str(len(launcher))) for launcher in launchers]
    assert len(rows[0]) == 4 and rows[0] == rows[-1]


def test_the_table_has_every_example():
    text = (ROOT / "docs" / "examples.md").read_text()
    missing = [path.name for path in (ROOT / "examples").glob("[!_]*.*") if f"(../examples/{path.name})" not in text]
    assert not missing
