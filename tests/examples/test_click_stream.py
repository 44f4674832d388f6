"""The click stream: what its generator promises, what is measured, and that its run ends alike however started."""

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update
from ignite_engine.cli import main
from ignite_engine.task import TaskError, build_task, find_task
from tests.faults.processes import train

ROOT = Path(__file__).resolve().parents[2]
build = find_task("click_stream.py:build", ROOT / "examples")
example = sys.modules[build.__module__]

SMALL = ["task_options.windows=3", "task_options.samples=3000", "data.batch_size=64", "task_options.rows=4096"]
QUIET = ["logging.clearml=false", "logging.progress=false", "logging.report=false"]


@pytest.fixture(scope="module", autouse=True)
def threads():
    """The config sets those of the process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def auc(scores, clicks):
    """By counting pairs."""
    ordered = np.sort(scores[clicks == 0])
    below = np.searchsorted(ordered, scores[clicks == 1], "left") + np.searchsorted(
        ordered, scores[clicks == 1], "right"
    )
    return float(below.mean() / 2 / len(ordered))


@pytest.fixture(scope="module")
def window():
    columns = example.Generator(example.Options(samples=300_000))(0)
    assert isinstance(columns, dict)
    return columns


def test_linear_part_and_optimum_are_on_the_ladder_of_public_click_data(
    window,
):
    assert auc(window["linear"], window["click"]) == pytest.approx(0.79, abs=0.004)
    assert auc(window["optimum"], window["click"]) == pytest.approx(0.815, abs=0.004)
    probability = 1 / (1 + np.exp(-window["optimum"].astype(np.float64)))
    assert probability.mean() == pytest.approx(window["click"].mean(), abs=0.003)


def test_no_linear_model_is_better_than_the_linear_part(window):
    """A logistic regression on each id and dense feature, trained on half of a window."""
    columns = [np.unique(column, return_inverse=True)[1] for column in window["ids"].T]
    starts = np.cumsum([0, *[column.max() + 1 for column in columns]])
    ids = torch.from_numpy(np.stack(columns, 1) + starts[:-1])
    dense, clicks = torch.from_numpy(window["dense"]), torch.from_numpy(window["click"])
    weights, layer = nn.EmbeddingBag(int(starts[-1]), 1, mode="sum"), nn.Linear(dense.shape[1], 1)
    nn.init.zeros_(weights.weight)
    optimizer = torch.optim.Adam([*weights.parameters(), *layer.parameters()], lr=0.02)
    half = len(clicks) // 2
    for _ in range(2):
        for rows in torch.randperm(half, generator=torch.Generator().manual_seed(0)).split(2000):
            logits = (weights(ids[rows]) + layer(dense[rows])).squeeze(1)
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(logits, clicks[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        learned = (weights(ids[half:]) + layer(dense[half:])).squeeze(1).numpy()

    reached, promised = (auc(scores, window["click"][half:]) for scores in (learned, window["linear"][half:]))
    assert promised - 0.006 < reached < promised + 0.001


def test_windows_are_functions_of_their_number():
    def made(number, **options):
        return example.Generator(example.Options(samples=500, **options))(number)

    assert all(np.array_equal(made(3)[name], column) for name, column in made(3).items())
    assert not np.array_equal(made(3)["ids"], made(4)["ids"])
    still, drifted = made(3), made(3, drift=0.5)
    assert np.array_equal(still["ids"], drifted["ids"]) and not np.allclose(still["optimum"], drifted["optimum"])
    assert np.allclose(drifted["linear"].std(), still["linear"].std(), rtol=0.2)


def test_metrics_are_what_they_are_defined_as():
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

    assert [found["auc"], found["linear_auc"], found["optimum_auc"]] == pytest.approx(
        [model, linear, optimum], abs=1e-4
    )
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert found["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-5)
    assert found["calibration"] == pytest.approx(logits[:, 0].sigmoid().mean().item() / share, rel=1e-5)
    assert found["gap_closed"] == pytest.approx((model - linear) / (optimum - linear), abs=0.01)


def run(folder, *overrides):
    """The weights' digest and the metrics of each window."""
    config = str(ROOT / "configs" / "click_stream.yaml")
    assert main(["train", config, f"run.directory={folder}", *SMALL, *QUIET, *overrides]) == 0
    return results(folder)


def results(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    windows = [
        {key: value for key, value in line.items() if key.startswith("progressive/") and not isinstance(value, dict)}
        for line in lines
        if "progressive/auc" in line
    ]
    return json.loads((folder / "summary.json").read_text())["weights_sha256"], windows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


def test_run_that_is_resumed_ends_with_the_same_bits(tmp_path, whole):
    run(tmp_path, "run.max_iterations=7", "checkpoint.every=10")
    assert run(tmp_path, "checkpoint.every=10") == whole


def test_files_that_the_generator_wrote_train_the_same_weights(tmp_path, whole):
    example.write(tmp_path / "windows", example.Options(windows=3, samples=3000))
    assert run(tmp_path / "run", f"task_options.directory={tmp_path / 'windows'}") == whole


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_train_and_measure_as_one(tmp_path, whole):
    values = yaml.safe_load((ROOT / "configs" / "click_stream.yaml").read_text())
    values["task"] = f"{ROOT / 'examples' / 'click_stream.py'}:build"
    values["run"]["directory"] = str(tmp_path / "run")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    train(tmp_path / "config.yaml", *SMALL, *QUIET, "--nproc-per-node", "2", "--backend", "gloo")
    digest, windows = results(tmp_path / "run")

    assert len(windows) == len(whole[1]) == 3 and digest
    assert windows[0] == pytest.approx(whole[1][0], abs=1e-6)  # before anything is trained
    for ours, alone in zip(windows, whole[1], strict=True):
        assert ours == pytest.approx(alone, abs=2e-3)


@pytest.mark.slow
def test_windows_make_the_model_better_than_any_linear_one(tmp_path):
    """60 windows of 100,000 close more than nine tenths of the gap; these few begin to."""
    _, windows = run(tmp_path, "task_options.windows=6", "task_options.samples=50000", "data.batch_size=512")
    closed = [each["progressive/gap_closed"] for each in windows]

    assert closed[0] < -1 and closed[-1] > 0.15 and closed[-1] == max(closed)
    assert windows[-1]["progressive/calibration"] == pytest.approx(1, abs=0.1)
    assert windows[-1]["progressive/normalized_entropy"] < 0.85


@pytest.mark.parametrize(
    ("options", "line"), [({"windows": 0}, "windows must be at least 1"), ({"x": 1}, "unexpected")]
)
def test_wrong_option_is_an_error_of_the_task(options, line):
    with pytest.raises(TaskError, match=line):
        build_task(build, options)


# -- the published check of DLRM --------------------------------------------------------------------------------------


class PublishedModel(nn.Module):
    """Naumov et al. 2019, arXiv 1906.00091, at the sizes and with the initial weights of its published check."""

    def __init__(self, draw):
        super().__init__()
        self.tables = nn.ModuleList()
        for rows in (4, 3, 2):
            bound = math.sqrt(1 / rows)
            weight = torch.tensor(draw.uniform(-bound, bound, (rows, 2)), dtype=torch.float32)
            self.tables.append(nn.EmbeddingBag(rows, 2, mode="sum", sparse=True, _weight=weight))
        self.bottom, self.top = self.layers(draw, 4, 3, 2), self.layers(draw, 8, 4, 2, 1)

    @staticmethod
    def layers(draw, *sizes):
        made = []
        for inputs, outputs in pairwise(sizes):
            layer = nn.Linear(inputs, outputs)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.copy_(torch.from_numpy(draw.rand(*parameter.shape)))
            made += [layer, nn.Sigmoid() if outputs == 1 else nn.ReLU()]
        return nn.Sequential(*made)

    def forward(self, dense, bags):
        below = self.bottom(dense)
        found = [table(ids, starts) for table, (ids, starts) in zip(self.tables, bags, strict=True)]
        products = example.dot_products(torch.stack([below, *found], dim=1))
        clicks = self.top(torch.cat([below, products], dim=1))
        return clicks


def published_batches(draw):
    """Three batches of two samples: the features of all of them are drawn before any target."""
    features = []
    for _ in range(3):
        dense, bags = torch.tensor(draw.rand(2, 4), dtype=torch.float32), []
        for rows in (4, 3, 2):
            ids, starts = list[int](), list[int]()
            for _ in range(2):
                count = max(1, round(draw.rand() * min(rows, 10)))
                starts.append(len(ids))
                ids += np.unique(np.round(draw.rand(count) * (rows - 1)).astype(int)).tolist()
            bags.append((torch.tensor(ids), torch.tensor(starts)))
        features.append((dense, bags))
    return [(*each, torch.tensor(draw.rand(2, 1), dtype=torch.float32)) for each in features]


def test_published_dlrm_has_its_published_losses():
    """``dlrm_s_pytorch.py --mini-batch-size=2 --data-size=6`` prints these."""
    draw = np.random.RandomState(123)
    batches, model = published_batches(draw), PublishedModel(draw)

    def loss_fn(model, batch):
        dense, bags, targets = batch
        return nn.functional.mse_loss(model(dense, bags), targets)

    optimizers = {
        "tables": torch.optim.SGD(model.tables.parameters(), lr=0.01),
        "dense": torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], lr=0.01),
    }
    trainer, losses = Trainer(Update(model, optimizers, loss_fn)), list[str]()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(f"{trainer.state.output['loss']:.6f}"))
    trainer.run(batches)

    assert losses == ["0.451893", "0.402002", "0.275460"]
