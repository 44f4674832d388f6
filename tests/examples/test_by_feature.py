"""The short examples show what they say they show."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn

from examples import (
    clearml_run,
    compiled_model,
    custom_event,
    custom_handler,
    early_stopping_ema,
    eight_bit_layers,
    fine_tune,
    fsdp,
    inference,
    lr_finder,
    minimal,
    own_update,
    profiling,
    resume,
    several_processes,
    tensor_parallel,
    tensorboard_curves,
    two_losses,
    unfreezing,
)
from ignite_engine import Trainer, TrainingEvents, Update, load_weights, loader
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.handlers import MetricLogger
from tests.builders import on_two_ranks, weights
from tests.faults.commands import Command

ROOT = Path(__file__).resolve().parents[2]


def logged(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def saved(directory: Path) -> list[int]:
    return [each.iteration for each in CheckpointStore(directory / "checkpoints").checkpoints()]


def test_lr_finder_suggests_a_rate_that_learns_and_leaves_no_trace_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lr_finder.main(str(tmp_path / "found"), epochs=2)
    lr = found.update.optimizers["optimizer"].param_groups[0]["lr"]  # type: ignore[attr-defined]  # an Update
    assert 1e-4 < lr < 5 and f"learning rate {lr:.2g}" in capsys.readouterr().out
    losses = [row["loss"] for row in logged(tmp_path / "found")]
    assert losses[-1] < losses[0]

    monkeypatch.setattr(lr_finder, "find_lr", lambda samples: lr)
    assert torch.equal(weights(lr_finder.main(str(tmp_path / "given"), epochs=2)), weights(found))


def test_minimal_learns_and_started_again_continues(tmp_path: Path) -> None:
    whole = minimal.main(str(tmp_path / "whole"), epochs=3)
    minimal.main(str(tmp_path / "cut"), epochs=2)
    resumed = minimal.main(str(tmp_path / "cut"), epochs=3)

    assert resumed.state.start.value == "resumed" and torch.equal(weights(resumed), weights(whole))
    rows = logged(tmp_path / "whole")
    assert rows == logged(tmp_path / "cut") and rows[-1]["loss"] < 0.5 * rows[0]["loss"]


def test_custom_handler_finds_the_spoiled_batches_and_is_resumed(tmp_path: Path) -> None:
    def jumps(directory: Path) -> list[float]:
        return [row["loss_jumps"] for row in logged(directory)]

    custom_handler.main(str(tmp_path / "whole"))
    custom_handler.main(str(tmp_path / "cut"), batches=60)
    custom_handler.main(str(tmp_path / "cut"))

    assert jumps(tmp_path / "whole") == [0, 1, 2, 3, 3] == jumps(tmp_path / "cut")


def test_custom_event_saves_at_every_second_halving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    custom_event.main(str(tmp_path / "whole"), epochs=9)
    printed = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in printed.splitlines() if "halved" in line]
    assert len(losses) >= 4 and all(later <= earlier / 2 for earlier, later in itertools.pairwise(losses))
    epochs = [int(line.split()[1].strip(":")) for line in printed.splitlines() if "halved" in line]
    assert saved(tmp_path / "whole") == sorted({8 * epoch for epoch in epochs[1::2]} | {8 * 9})

    custom_event.main(str(tmp_path / "cut"), epochs=epochs[2])  # an odd number of times
    custom_event.main(str(tmp_path / "cut"), epochs=9)
    assert set(saved(tmp_path / "whole")) <= set(saved(tmp_path / "cut"))


def test_own_update_is_that_of_the_optimizer_at_radius_0_and_is_resumed(tmp_path: Path) -> None:
    whole = own_update.main(str(tmp_path / "whole"), epochs=3)
    own_update.main(str(tmp_path / "cut"), epochs=2)
    resumed = own_update.main(str(tmp_path / "cut"), epochs=3)
    assert resumed.state.start.value == "resumed" and torch.equal(weights(resumed), weights(whole))
    assert all(row["loss/nearby"] > row["loss"] for row in logged(tmp_path / "whole"))


def test_own_update_at_radius_0_is_an_ordinary_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_0 = own_update.main(str(tmp_path / "at_0"), epochs=1, rho=0.0)
    at_some = own_update.main(str(tmp_path / "at_some"), epochs=1)

    def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer, rho: float) -> Update:
        return Update(model, optimizer, own_update.loss_fn)

    monkeypatch.setattr(own_update, "SharpnessAwareUpdate", ordinary)
    plain = own_update.main(str(tmp_path / "plain"), epochs=1)

    assert torch.equal(weights(at_0), weights(plain)) and not torch.equal(weights(at_some), weights(plain))


def test_two_losses_are_summed_and_each_falls(tmp_path: Path) -> None:
    two_losses.main(str(tmp_path))
    rows = logged(tmp_path)

    assert all(row["loss"] == pytest.approx(row["loss/class"] + row["loss/restored"], rel=1e-5) for row in rows)
    assert all(rows[-1][key] < 0.5 * rows[0][key] for key in ("loss/class", "loss/restored"))
    assert rows[-1]["accuracy"] > 0.9


def test_resumed_run_has_the_bits_of_the_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume.main(str(tmp_path))
    lines = capsys.readouterr().out.splitlines()

    whole, stopped, resumed = (line.rpartition(" ")[2] for line in lines[:3])
    assert lines[1].startswith("stopped, fresh: interrupted at 13,") and lines[2].startswith("stopped, resumed:")
    assert whole == resumed != stopped and lines[3] == "the same bits"
    assert logged(tmp_path / "whole") == logged(tmp_path / "stopped")


@pytest.mark.slow
def test_fine_tuned_network_keeps_the_body_and_beats_one_from_scratch(tmp_path: Path) -> None:
    accuracies = fine_tune.main(str(tmp_path))

    assert accuracies["tuned"] > accuracies["from scratch"] + 0.1 and accuracies["tuned"] > 0.85


@pytest.mark.slow
def test_two_ranks_train_as_one_process_and_continue(tmp_path: Path) -> None:
    """DDP, FSDP2 and tensor parallel, each started twice."""
    alone = several_processes.train(0, str(tmp_path / "alone"))

    def on_a_rank(rank: int) -> dict[str, Any]:
        folder = str(tmp_path / "several_processes")
        trainers = [several_processes.train(rank, folder) for _ in range(2)]
        return {
            "start": [trainer.state.start.value for trainer in trainers],
            "iteration": [trainer.state.iteration for trainer in trainers],
            "weights": weights(trainers[0]).tolist(),
            "fsdp": [fsdp.train(rank, str(tmp_path / "fsdp")) for _ in range(2)],
            "tensor": [tensor_parallel.train(rank, str(tmp_path / "tensor")) for _ in range(2)],
        }

    found = on_two_ranks(on_a_rank, tmp_path / "meeting_point")

    assert found["start"] == [["fresh", "resumed"]] * 2 and found["iteration"] == [[alone.state.iteration] * 2] * 2
    assert found["weights"][0] == found["weights"][1]
    torch.testing.assert_close(torch.tensor(found["weights"][0]), weights(alone), rtol=1e-4, atol=1e-5)
    for name, example in (("fsdp", fsdp), ("tensor", tensor_parallel)):
        first, again = found[name][0]
        assert first == again and 0.4 * first[1] < first[0] < 0.6 * first[1]
        rows, model = logged(tmp_path / name), example.network()
        assert [row["iteration"] for row in rows] == [8, 16, 24, 32] and rows[-1]["loss"] < 0.6 * rows[0]["loss"]
        load_weights(model, tmp_path / name)
        inputs, targets = example.samples().tensors
        assert (model.eval()(inputs).argmax(dim=1) == targets).float().mean() > 0.85
    assert sum(each[0][0] for each in found["fsdp"]) == found["fsdp"][0][0][1]  # every weight once


@pytest.mark.slow
def test_fsdp_has_the_losses_of_one_process(tmp_path: Path) -> None:
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
    [("several_processes", [(), TORCHRUN]), ("fsdp", [()]), ("tensor_parallel", [TORCHRUN])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_are_started_by_the_script_and_by_torchrun(
    name: str, launchers: list[tuple[str, ...]], tmp_path: Path
) -> None:
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


def test_frozen_body_has_no_gradient_until_it_is_trained_and_is_resumed_after_it(tmp_path: Path) -> None:
    def watched() -> tuple[Trainer, list[tuple[bool, bool]]]:
        trainer = build()
        model: Any = trainer.update.model  # type: ignore[attr-defined]  # an Update
        before = model.body[0].weight.detach().clone()
        seen: list[tuple[bool, bool]] = []

        @trainer.on(TrainingEvents.OPTIMIZER_STEP_STARTED)
        def look(_: Trainer) -> None:
            weight = model.body[0].weight
            seen.append((weight.grad is not None, not torch.equal(weight, before)))

        return trainer, seen

    build, looks = unfreezing.build, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unfreezing, "build", lambda: looks.append(watched()) or looks[-1][0])
        whole = unfreezing.main(str(tmp_path / "whole"), epochs=4)
    assert looks[0][1] == 32 * [(False, False)] + [(True, False)] + 31 * [(True, True)]

    unfreezing.main(str(tmp_path / "cut"), epochs=3)
    resumed = unfreezing.main(str(tmp_path / "cut"), epochs=4)
    assert resumed.state.start.value == "resumed" and torch.equal(weights(resumed), weights(whole))
    rates = [(row["lr"], row.get("lr/body")) for row in logged(tmp_path / "cut")]
    assert rates == [(1e-2, None), (1e-2, None), (1e-2, 3e-3), (1e-2, 3e-3)]


def test_best_average_is_restored_after_an_early_stop(tmp_path: Path) -> None:
    trainer = early_stopping_ema.main(str(tmp_path))
    values = {row["iteration"]: row["val/loss"] for row in logged(tmp_path)}
    best = min(values, key=values.__getitem__)
    assert trainer.state.status == "completed" and trainer.state.reason.startswith("early stopping: val/loss")
    assert trainer.state.epoch < 50 and list(values)[-5:][0] == best

    store = CheckpointStore(tmp_path / "checkpoints")
    state = store.load(store.directory / f"iteration_{best:08}", rank=0).shared
    average = torch.cat([each.flatten() for each in state["ema"]["weights"].values()])
    trained = torch.cat([each.flatten() for each in state["model"].values()])
    assert torch.equal(weights(trainer), average) and not torch.equal(average, trained)


def test_compiled_run_goes_on_without_the_compiler(tmp_path: Path) -> None:
    plain = compiled_model.main(str(tmp_path / "plain"), None)
    compiled = compiled_model.main(str(tmp_path / "run"), "eager", epochs=2)
    assert type(compiled.update.model).__name__ == "OptimizedModule"  # type: ignore[attr-defined]  # an Update
    resumed = compiled_model.main(str(tmp_path / "run"), None)

    torch.testing.assert_close(weights(resumed), weights(plain), rtol=1e-5, atol=1e-6)
    found = CheckpointStore(tmp_path / "run" / "checkpoints").checkpoints()[-1].path
    assert next(iter(CheckpointStore(found.parent).load(found, rank=0).shared["model"])) == "0.weight"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile calls")
def test_compiled_by_inductor_it_has_the_losses_of_the_plain_run(tmp_path: Path) -> None:
    compiled_model.main(str(tmp_path / "plain"), None)
    compiled_model.main(str(tmp_path / "compiled"), epochs=2)
    compiled_model.main(str(tmp_path / "compiled"))
    losses = [[row["loss"] for row in logged(tmp_path / name)] for name in ("plain", "compiled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_inference_has_the_accuracy_that_the_run_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = inference.main(str(tmp_path / "run"))
    best = max(row["val/accuracy"] for row in logged(tmp_path / "run") if "val/accuracy" in row)

    assert capsys.readouterr().out.splitlines()[-1] == f"accuracy {best:.4f}" and not model.training
    assert best > 0.8


def test_tensorboard_has_curves_over_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tensorboard_curves.main(str(tmp_path), epochs=2)
    tensorboard_curves.main(str(tmp_path))
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()

    curve = [(event.step, event.value) for event in read.Scalars("loss")]
    assert curve == [(row["iteration"], pytest.approx(row["loss"], rel=1e-6)) for row in logged(tmp_path)]
    assert [step for step, _ in curve] == list(range(4, 33, 4)) and curve[-1][1] < curve[0][1]


@pytest.mark.slow
def test_clearml_session_has_the_curve_over_a_resume(tmp_path: Path) -> None:
    clearml_run.main(str(tmp_path), epochs=2)
    clearml_run.main(str(tmp_path))
    (path,) = (tmp_path / "clearml" / "offline").glob("*/metrics.jsonl")  # one task
    points = [point for line in path.read_text().splitlines() for point in json.loads(line)]

    curve = [(point["iter"], point["value"]) for point in points if point["metric"] == "loss"]
    assert curve == [(row["iteration"], pytest.approx(row["loss"])) for row in logged(tmp_path)]
    assert [step for step, _ in curve] == list(range(4, 65, 4))
    assert '"0.01"' in (path.parent / "task.json").read_text()  # the config's rate
    assert list(path.parent.parent.glob("*.zip"))


@pytest.mark.slow
def test_hugging_face_model_learns_and_goes_back_to_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from examples import hugging_face

    hugging_face.main(str(tmp_path), epochs=3)
    saved = hugging_face.main(str(tmp_path))

    assert capsys.readouterr().out.splitlines()[-1] == "5, 6, 7 goes on: [8, 9, 10, 11, 12]"
    rows = logged(tmp_path)
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5] and rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    fresh = hugging_face.GPT2LMHeadModel(saved.config)
    load_weights(fresh, tmp_path)
    assert all(map(torch.equal, fresh.state_dict().values(), saved.state_dict().values()))


def test_eight_bit_layers_compute_with_the_numbers_of_fp8_and_train_as_bf16_does(tmp_path: Path) -> None:
    layer = eight_bit_layers.convert(nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 1)))[0]  # type: ignore[index]
    inputs = torch.randn(2, 8, requires_grad=True)
    outputs = layer(inputs)
    outputs.backward(torch.randn(2, 4))
    weight, gradient = layer.weight, layer.weight.grad
    assert len(eight_bit_layers.rounded(weight.detach(), torch.float8_e4m3fn).unique()) <= 32
    assert not torch.equal(outputs, nn.functional.linear(inputs, weight)) and gradient is not None
    torch.testing.assert_close(outputs, nn.functional.linear(inputs, weight), rtol=0.1, atol=0.2)
    assert eight_bit_layers.rounded(torch.tensor([1.0, 0.03, -0.9]), torch.float8_e4m3fn).tolist() == pytest.approx(
        [1.0, 0.03, -0.9], rel=2**-4
    )

    whole = eight_bit_layers.main(str(tmp_path / "whole"))
    eight_bit_layers.main(str(tmp_path / "cut"), epochs=3)
    resumed = eight_bit_layers.main(str(tmp_path / "cut"))
    assert (
        resumed.state.start.value == "resumed"
        and torch.equal(weights(resumed), weights(whole))
        and weights(whole).dtype == torch.float32
    )
    plain = eight_bit_layers.main(str(tmp_path / "bf16"), eight_bit=False)
    assert not torch.equal(weights(plain), weights(whole))
    losses = [logged(tmp_path / name)[-1]["loss"] for name in ("whole", "bf16")]
    assert losses[0] == pytest.approx(losses[1], rel=0.3) and losses[0] < 0.2


def test_profile_has_the_slow_operator_among_the_longest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiling.main(str(tmp_path), iterations=20)

    assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == [
        "rank_0_iterations_13_to_15.json.gz",
        "rank_0_iterations_13_to_15.txt",
    ]
    longest = capsys.readouterr().out.splitlines()[-5:]
    assert ["aten::sort", "3"] in [line.split()[:2] for line in longest]  # once in each iteration
    assert set(profiling.PARTS) <= logged(tmp_path)[-1].keys()


def test_the_table_has_every_example() -> None:
    text = (ROOT / "docs" / "examples.md").read_text()
    missing = [path.name for path in (ROOT / "examples").glob("[!_]*.*") if f"(../examples/{path.name})" not in text]
    assert not missing
