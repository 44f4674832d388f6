"""The shipped configs train, stop and resume, and measure what they say they measure."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ignite_engine import loader
from ignite_engine.runs.task import TaskError, build_task, find_task
from tests.examples.golden import CONFIGS, ITERATIONS, OPTIONS, environment, losses, recorded
from tests.kit import runs
from tests.kit.fitting import log, read
from tests.kit.refusals import command, refusals

ROOT = Path(__file__).resolve().parents[2]
BUILD = {name: find_task(f"{name}.py:build", ROOT / "examples") for name in OPTIONS}
QUIET = [
    *(f"handlers.{label}=null" for label in ("ClearML", "Progress", "Report")),
    "handlers.MetricLogger.console=false",
]
SMALL = {
    "byte_gpt": ["task_options.width=16", "task_options.layers=1"],
    "click_stream": ["task_options.windows=3", "task_options.samples=1000"],
    "digits": ["run.max_epochs=null", "data.batch_size=16"],
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


def train(name, folder, last, *overrides):
    words = [f"run.directory={folder}", f"run.max_iterations={last}", *SMALL[name], *QUIET, *overrides]
    said = command("train", CONFIGS / f"{name}.yaml", *words)
    return {**read(folder), "said": said}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "click_stream")) for name in SMALL]
)
def test_a_config_trains_and_resumes_to_the_same_bits(name, tmp_path):
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(SMALL)
    last, fixed = ("null", []) if name == "click_stream" else (6, ["schedule.total=6"])
    whole = train(name, tmp_path / "whole", last, *fixed)
    train(name, tmp_path / "run", 3, *fixed)
    resumed = train(name, tmp_path / "run", last, *fixed)
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["status"] == "completed"


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIONS)
def test_a_config_trains_to_its_golden_losses(name, tmp_path):
    """Where they change on purpose: ``python -m tests.examples.golden``, and a line in CHANGELOG.md."""
    kept = recorded()[name]
    if environment() not in kept:
        pytest.skip(f"no golden losses for {environment()}")
    found = losses(name, tmp_path / "run")
    assert len(found["losses"]) == ITERATIONS and found == kept[environment()]


def misspelled(name):
    return lambda: build_task(BUILD[name], {"widht": 10})


test_an_option_that_is_not_known_is_refused = refusals([(name, misspelled(name), TaskError, "widht") for name in BUILD])


# ---------------------------------------------------------------------------------------------------------- byte GPT


@pytest.mark.nightly
def test_the_byte_gpt_ends_with_a_text_and_its_bits_beside_those_of_trigrams(tmp_path):
    found = train("byte_gpt", tmp_path / "run", 40, "handlers.Evaluation.every=20")
    lines = [line for line in log(tmp_path / "run") if "val/bits_per_byte" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["val/bits_per_byte"] == pytest.approx(line["val/loss"] / math.log(2), rel=1e-6)
    assert 2 < lines[0]["val/trigram_bits_per_byte"] == lines[1]["val/trigram_bits_per_byte"] < 3.5
    assert f"{lines[-1]['val/bits_per_byte']:.3f} bits per byte" in found["said"] and "def read(self" in found["said"]


def losses_of_the_loop(task, steps):
    """The losses of the first updates of ``configs/byte_gpt.yaml`` in the loop that everybody writes."""
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    warmup, losses, batches = 2, [], iter(loader(task.train_set, batch_size=8, shuffle=True, seed=0))
    for update in range(steps):
        progress = (update - warmup) / (steps - warmup)
        factor = (update + 1) / warmup if update < warmup else 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2
        optimizer.param_groups[0]["lr"] = 3e-3 * factor
        windows = next(batches).long()
        logits = task.model(windows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.nightly
def test_the_losses_of_the_byte_gpt_are_those_of_the_loop_by_hand(tmp_path):
    """Bit for bit, through warm-up, cosine and clipping."""
    steps = 8
    train("byte_gpt", tmp_path / "run", steps, "handlers.MetricLogger.every=1", "schedule.warmup=2")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = build_task(BUILD["byte_gpt"], {"context": 64, "width": 16, "layers": 1, "heads": 4})
    found = [line["loss"] for line in log(tmp_path / "run") if "loss" in line]
    assert found == losses_of_the_loop(task, steps) and len(set(found)) == steps


# ------------------------------------------------------------------------------------------------------- click stream


@pytest.mark.nightly
def test_each_window_is_measured_before_it_is_trained_on(tmp_path):
    train("click_stream", tmp_path / "run", "null", "task_options.windows=8", "task_options.samples=8192")
    found = [line["progressive/loss"] for line in log(tmp_path / "run") if "progressive/loss" in line]
    assert len(found) == 8 and found[0] == pytest.approx(math.log(2), abs=0.02)  # nothing is known of the first one
    assert found[-1] == min(found) < 0.6


@pytest.mark.nightly
def test_two_ranks_train_and_measure_as_one(tmp_path):
    train("click_stream", tmp_path / "whole", "null")
    words = [f"run.directory={tmp_path / 'run'}", *SMALL["click_stream"], *QUIET]
    process = runs.command(
        ROOT, "train", CONFIGS / "click_stream.yaml", *words, "--nproc-per-node", "2", "--backend", "gloo"
    )
    assert process.wait(120) == 0, process.said()
    for ours, alone in zip(log(tmp_path / "run"), log(tmp_path / "whole"), strict=True):
        measured = {key: value for key, value in alone.items() if key.startswith("progressive/")}
        assert {key: ours[key] for key in measured} == pytest.approx(measured, abs=5e-3)


# ------------------------------------------------------------------------------------------------------------- digits


@pytest.mark.nightly
def test_the_digits_are_split_once_and_turned_in_training_alone():
    digits = sys.modules[BUILD["digits"].__module__]
    splits = digits.load_splits(0)
    images = [{image.numpy().tobytes() for image, _ in split} for split in splits]
    assert [len(split) for split in splits] == [359, 359, 1079]
    assert not images[0] & images[1] and not images[0] & images[2] and not images[1] & images[2]
    turned = digits.Rotated(splits[2], 12.0)
    first, second = (turned[3][0] for _ in range(2))
    assert not torch.equal(first, second) and (first - splits[2][3][0]).abs().mean() < 0.15


@pytest.mark.nightly
def test_the_digits_reach_the_accuracy_that_their_config_states(tmp_path):
    words = [ROOT / "configs" / "digits.yaml", f"run.directory={tmp_path}/run", "handlers.Progress=null"]
    command("train", *words)
    found = json.loads(command("evaluate", *words, "--checkpoint", "best"))
    assert read(tmp_path / "run")["reason"].startswith("early stopping: val/accuracy")
    assert found["val/accuracy"] == max(line.get("val/accuracy", 0) for line in log(tmp_path / "run"))
    assert found["test/accuracy"] >= 0.975
