"""The shipped configs train, stop and resume, and measure what they say they measure."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ignite_engine.runs.config import load_config
from ignite_engine.runs.task import TaskError, build_task, find_task
from tests.examples.golden import CONFIGS, ITERATIONS, OPTIONS, environment, losses, recorded
from tests.kit import runs
from tests.kit.fitting import log, read
from tests.kit.refusals import command, refusals

ROOT = Path(__file__).resolve().parents[2]
BUILD = {name: find_task(f"{name}.py:build", ROOT / "examples") for name in ("byte_gpt", "click_stream", "digits")}
QUIET = [
    *(f"handlers.{label}=null" for label in ("ClearML", "Progress", "Report")),
    "handlers.MetricLogger.console=false",
]
SMALL = {
    "byte_gpt": ["task_options.validation_windows=8", "data.batch_size=1", "task_options.width=32"],
    "click_stream": ["task_options.windows=2", "task_options.samples=1000", "data.batch_size=64"],
    "digits": ["run.max_epochs=null", "data.batch_size=16"],
    "nanogpt_cpu": ["task_options.eval_windows=4", "data.batch_size=2"],
}


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    """What nanoGPT reads, instead of a corpus of a megabyte."""
    (tmp_path / "input.txt").write_text((ROOT / "README.md").read_text())
    monkeypatch.chdir(ROOT)
    return tmp_path / "input.txt"


def train(name, folder, last, *overrides):
    words = [f"run.directory={folder}", f"run.max_iterations={last}", *SMALL[name], *QUIET, *overrides]
    if name == "nanogpt_cpu":
        words.append(f"task_options.text={folder.parent / 'input.txt'}")
    command("train", ROOT / "configs" / f"{name}.yaml", *words)
    return read(folder)


LONG = ("byte_gpt", "digits", "nanogpt_cpu")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in LONG)) for name in SMALL])
def test_a_config_trains_and_resumes_to_the_same_bits(name, tmp_path):
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(SMALL)
    if name == "click_stream":  # of windows, which have no length
        whole = train(name, tmp_path / "whole", "null")
        train(name, tmp_path / "run", 5)
        resumed = train(name, tmp_path / "run", "null")
    else:
        fixed = ["schedule.total=6"] if name != "nanogpt_cpu" else []
        whole = train(name, tmp_path / "whole", 6, *fixed)
        train(name, tmp_path / "run", 3, *fixed)
        resumed = train(name, tmp_path / "run", 6, *fixed)
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


WRONG = [
    ("heads", "byte_gpt", {"width": 10, "heads": 4}, "multiple heads"),
    ("orders", "byte_gpt", {"ngram_orders": [1]}, "from 2 to 7"),
    ("slots", "byte_gpt", {"ngram_slots": 100}, "power of two"),
    ("unknown", "byte_gpt", {"widht": 10}, "widht"),
    ("windows", "click_stream", {"windows": 0}, "windows at least 1"),
    ("width", "digits", {"width": 12}, "width multiple of 8 12"),
    ("rotation", "digits", {"rotation": -1.0}, "rotation at least 0 -1.0"),
]


def building(name, options):
    return lambda: build_task(BUILD[name], options)


test_options_that_cannot_be_are_refused = refusals(
    [(id, building(name, options), TaskError, words) for id, name, options, words in WRONG]
)


# ---------------------------------------------------------------------------------------------------------- byte GPT


@pytest.mark.nightly
def test_the_byte_gpt_is_measured_in_bits_per_byte_beside_its_baselines(tmp_path):
    train("byte_gpt", tmp_path / "run", 2, "handlers.Evaluation.every=1")
    lines = [line for line in log(tmp_path / "run") if "val/bits_per_byte" in line]
    for line in lines:
        assert line["val/bits_per_byte"] == pytest.approx(line["val/loss"] / math.log(2), rel=1e-6)
        assert 8 > line["baseline/order_0_bits_per_byte"] > line["baseline/order_1_bits_per_byte"] > 0


# ------------------------------------------------------------------------------------------------------------ nanoGPT


def losses_of_the_loop(text, steps, *, clip):
    """The losses of the first updates, in the way of nanoGPT's train.py on a CPU."""
    nanogpt = sys.modules[find_task("nanogpt.py:build", ROOT / "examples").__module__]
    vocabulary = sorted(set(text))
    data = torch.tensor([vocabulary.index(each) for each in text])[: int(0.9 * len(text))]
    draws = torch.Generator().manual_seed(1337)
    torch.manual_seed(1337)
    model = nanogpt.GPT(nanogpt.Options(), len(vocabulary))
    groups = [
        {"params": [each for each in model.parameters() if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    losses, warmup, decay = [], 2, 5
    for update in range(steps):
        progress = min(1.0, (update - warmup) / (decay - warmup))
        lr = 1e-4 + 0.5 * (1.0 + math.cos(math.pi * progress)) * (1e-3 - 1e-4)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (update + 1) / (warmup + 1) if update < warmup else lr
        places = torch.randint(len(data) - 64, (12,), generator=draws)
        inputs = torch.stack([data[place : place + 64] for place in places])
        targets = torch.stack([data[place + 1 : place + 65] for place in places])
        loss = functional.cross_entropy(model(inputs).view(-1, len(vocabulary)), targets.view(-1))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.mark.nightly
@pytest.mark.parametrize("clip", [False, True])
def test_the_losses_of_nanogpt_are_those_of_its_loop(clip, tmp_path, text):
    """Bit for bit, through warm-up, cosine and the rate at the end, also where the norm is over two groups."""
    steps = 7
    overrides = [
        *("data.batch_size=12", f"task_options.windows={12 * steps}", "task_options.eval_windows=12"),
        *("task_options.warmup_iters=2", "task_options.lr_decay_iters=5", "handlers.MetricLogger.every=1"),
        f"update.clip_norm={1.0 if clip else 'null'}",
    ]
    train("nanogpt_cpu", tmp_path / "run", steps, *overrides)
    found = [line["loss"] for line in log(tmp_path / "run") if "loss" in line]
    assert found == losses_of_the_loop(text.read_text(), steps, clip=clip) and len(set(found)) == steps


def test_the_setting_of_nanogpt_is_its_own():
    config = load_config(ROOT / "configs" / "nanogpt_cpu.yaml")
    update, optimizer = config.to_dict()["update"], config.to_dict()["optimizer"]
    assert (config.run.max_iterations, config.data.batch_size, update["clip_norm"]) == (2000, 12, 1.0)
    assert (optimizer["lr"], optimizer["betas"]) == (1e-3, [0.9, 0.99])


# ------------------------------------------------------------------------------------------------------- click stream


def auc(scores, clicks):
    """By counting pairs."""
    ordered = np.sort(scores[clicks == 0])
    sides = [np.searchsorted(ordered, scores[clicks == 1], side) for side in ("left", "right")]
    return float(sum(sides).mean() / 2 / len(ordered))


@pytest.fixture(scope="module")
def example():
    return sys.modules[BUILD["click_stream"].__module__]


def test_windows_are_functions_of_their_number_on_the_ladder_of_public_click_data(example):
    def made(number, **options):
        return example.Generator(example.Options(**{"samples": 500, **options}))(number)

    window = made(0, samples=60_000)
    assert auc(window["linear"], window["click"]) == pytest.approx(0.79, abs=0.01)
    assert auc(window["optimum"], window["click"]) == pytest.approx(0.815, abs=0.01)
    assert all(np.array_equal(made(3)[name], column) for name, column in made(3).items())
    assert not np.array_equal(made(3)["ids"], made(4)["ids"])
    still, drifted = made(3), made(3, drift=0.5)
    assert np.array_equal(still["ids"], drifted["ids"]) and not np.allclose(still["optimum"], drifted["optimum"])


def test_click_metrics_are_what_they_are_defined_as(example):
    torch.manual_seed(0)
    logits = 2 * torch.randn(5000, 3)
    clicks = (torch.rand(5000) < logits[:, 2].sigmoid()).float()
    logits[:50, 0] = logits[50:100, 0]  # ties
    metric = example.ClickMetrics()
    for rows in torch.arange(5000).split(900):
        metric.update((logits[rows], clicks[rows]))
    found, share = metric.compute(), clicks.mean().item()
    model, linear, optimum = (auc(logits[:, scorer].numpy(), clicks.numpy()) for scorer in range(3))
    loss = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], clicks).item()
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)

    assert [found[f"{name}auc"] for name in ("", "linear_", "optimum_")] == pytest.approx(
        [model, linear, optimum], abs=1e-4
    )
    assert found["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-5)
    assert found["calibration"] == pytest.approx(logits[:, 0].sigmoid().mean().item() / share, rel=1e-5)


def test_files_that_the_generator_wrote_train_the_same_weights(example, tmp_path):
    whole = train("click_stream", tmp_path / "whole", "null")
    example.write(tmp_path / "windows", example.Options(windows=2, samples=1000))
    found = train("click_stream", tmp_path / "run", "null", f"task_options.directory={tmp_path / 'windows'}")
    assert found["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.nightly
def test_windows_make_the_model_better_than_any_linear_one(tmp_path):
    larger = ["task_options.windows=6", "task_options.samples=50000", "data.batch_size=512"]
    train("click_stream", tmp_path / "run", "null", *larger)
    windows = [line for line in log(tmp_path / "run") if "progressive/auc" in line]
    closed = [line["progressive/gap_closed"] for line in windows]
    assert closed[0] < -1 and closed[-1] > 0.15 and closed[-1] == max(closed)


@pytest.mark.nightly
def test_two_ranks_train_and_measure_as_one(tmp_path):
    train("click_stream", tmp_path / "whole", "null")
    words = [f"run.directory={tmp_path / 'run'}", "run.max_iterations=null", *SMALL["click_stream"], *QUIET]
    config = ROOT / "configs" / "click_stream.yaml"
    process = runs.command(ROOT, "train", config, *words, "--nproc-per-node", "2", "--backend", "gloo")
    assert process.wait(120) == 0, process.said()
    for ours, alone in zip(log(tmp_path / "run"), log(tmp_path / "whole"), strict=True):
        progressive = {key: value for key, value in alone.items() if key.startswith("progressive/")}
        nested = progressive.pop("progressive/clicks", {})
        assert {key: ours[key] for key in progressive} == pytest.approx(progressive, abs=5e-3)
        assert ours.get("progressive/clicks", {}) == pytest.approx(nested, abs=5e-3)


# ------------------------------------------------------------------------------------------------------------- digits


@pytest.mark.nightly
def test_the_digits_are_split_once_and_turned_in_training_alone():
    digits = sys.modules[BUILD["digits"].__module__]
    splits = digits.load_splits(0)
    sets = {name: {image.numpy().tobytes() for image in images} for name, (images, _) in splits.items()}
    assert {name: len(images) for name, (images, _) in splits.items()} == {"test": 359, "val": 359, "train": 1079}
    assert not (sets["test"] & sets["val"] or sets["test"] & sets["train"] or sets["val"] & sets["train"])

    task = build_task(BUILD["digits"], {})
    torch.manual_seed(0)
    first, second = (task.train_set[3][0] for _ in range(2))
    assert not torch.equal(first, second) and (first - splits["train"][0][3]).abs().mean() < 0.15
    for name, dataset in {**task.val_sets, **task.test_sets}.items():
        assert torch.equal(dataset[5][0], splits[name][0][5])


@pytest.mark.nightly
def test_the_digits_reach_the_accuracy_that_their_config_states(tmp_path):
    words = [ROOT / "configs" / "digits.yaml", f"run.directory={tmp_path}/run", "handlers.Progress=null"]
    command("train", *words)
    found = json.loads(command("evaluate", *words, "--checkpoint", "best"))
    assert read(tmp_path / "run")["reason"].startswith("early stopping: val/accuracy")
    assert found["val/accuracy"] == max(line.get("val/accuracy", 0) for line in log(tmp_path / "run"))
    assert found["test/accuracy"] >= 0.975
