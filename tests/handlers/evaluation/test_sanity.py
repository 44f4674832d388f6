"""A wrong metric or ``predict`` ends a run before it trains; a right one leaves no trace of the check."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, EpochMetric, Loss
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.kit.fitting import VAL, fitted, net
from tests.kit.processes import ranks

trained = partial(fitted, max_epochs=1, batch_size=4)


def predict(model, batch):
    return model(batch[0]), batch[1]


def refuse_to_train(trainer):
    raise AssertionError("it trains")


UNTRAINED = [(refuse_to_train, Events.ITERATION_STARTED)]
WRONG = {"accuracy": Accuracy(is_multilabel=True)}


def by_name(model, batch):
    return model(batch["x"]), batch["y"]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"metrics": WRONG}, ValueError, "Tensor [4, 3] float32, Tensor [4] int64"),
        ({"predict": by_name}, TypeError, ""),
    ],
)
def test_wrong_part_of_an_evaluation_ends_the_run_before_it_trains(tmp_path, arguments, kind, said, capsys):
    with pytest.raises(kind) as refusal:
        trained(tmp_path, **{"metrics": {"accuracy": Accuracy()}, "handlers": UNTRAINED, **arguments})
    notes = "\n".join(refusal.value.__notes__)
    assert "'val'" in notes and "predict(model, batch) must return" in notes and said in notes
    assert "terminating" not in capsys.readouterr().err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["iteration"]) == ("failed", 0)


class Counting(Dataset):
    """Augments by random numbers of each kind."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.read += 1
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return VAL[0][index] + noise, VAL[1][index]


class Tracing(nn.Module):
    """Draws in each forward, counts them in a buffer, and remembers in which modes."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("drawn", torch.zeros(3))
        self.modes = []

    def forward(self, inputs):
        self.replaced = self.replaced + 1
        self.drawn += torch.rand(3)
        self.modes.append(self.training)
        return self.inner(self.norm(inputs))


class Remembering(Accuracy):
    """Keeps what ``reset`` does not clear."""

    def __init__(self):
        self.computed = 0
        super().__init__()

    def compute(self):
        self.computed += 1
        return super().compute() + self.computed


def test_run_is_as_without_the_check(tmp_path):
    runs, models, sets = [], [], []
    for batches in (0, 2):
        models.append(Tracing())
        sets.append(Counting())
        metrics = {"accuracy": Remembering(), "nll": Loss(nn.functional.cross_entropy)}
        folder, evaluation = tmp_path / str(batches), {"sanity_batches": batches}
        runs.append(trained(folder, model=models[-1], val=sets[-1], metrics=metrics, Evaluation=evaluation))

    without, checked = runs
    assert sets[1].read == sets[0].read + 8  # it happened
    assert models[1].modes == [False] * 2 + models[0].modes
    assert checked.summary["weights_sha256"] == without.summary["weights_sha256"]  # buffers are in it
    assert checked.metrics == without.metrics and checked.metrics["val/accuracy"] > 1
    assert checked.trainer.state.evaluations == without.trainer.state.evaluations == 1
    folders = [run.directory.path for run in runs]
    files = [{path.name for path in folder.rglob("*")} for folder in folders]
    assert files[0] == files[1]
    assert (folders[0] / "metrics.jsonl").read_text() == (folders[1] / "metrics.jsonl").read_text()


def test_resumed_run_is_not_checked_again(tmp_path):
    trained(tmp_path)
    data = Counting()
    trained(tmp_path, val=data, max_epochs=2)
    assert data.read == 12  # the evaluation of the second epoch


class Stored(IterableDataset):
    """Each pass goes on with the same iterator."""

    def __init__(self):
        self.samples = iter(TensorDataset(*VAL))

    def __iter__(self):
        return self.samples


@pytest.mark.parametrize("kind", [Stored, lambda: DataLoader(Stored(), 4)])
def test_stream_that_can_be_read_once_is_left_to_its_evaluation(tmp_path, caplog, kind):
    values = [
        trained(tmp_path / name, val=val, Evaluation={"every": None}).metrics["val/loss"]
        for name, val in {"once": kind(), "set": VAL}.items()
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert sum("leaves out 'val'" in line for line in caplog.messages) == 1


def needs_each_class(predictions, targets):
    if len(set(targets.tolist())) < 3:
        raise ValueError("only some of the classes are there")
    return 1.0


def test_metric_that_needs_more_than_a_few_batches_is_not_refused(tmp_path):
    order = torch.argsort(VAL[1])
    metrics = {"all": EpochMetric(needs_each_class, check_compute_fn=False)}
    run = trained(tmp_path, val=(VAL[0][order], VAL[1][order]), batch_size=1, metrics=metrics)
    assert run.metrics["val/all"] == 1.0


def checked(rank, folder):
    metrics = {"accuracy": Accuracy(), "all": EpochMetric(needs_each_class, check_compute_fn=False)}
    runs = [
        trained(folder / str(count), metrics=metrics, predict=predict, Evaluation={"sanity_batches": count})
        for count in (0, 1)
    ]
    with pytest.raises(ValueError) as refused:
        trained(folder / "wrong", metrics=WRONG, handlers=UNTRAINED)
    few = trained(folder / "few", val=(VAL[0][:1], VAL[1][:1]), metrics={"accuracy": Accuracy()})
    same = runs[0].summary["weights_sha256"] == runs[1].summary["weights_sha256"] and runs[0].metrics == runs[1].metrics
    return same, "'val'" in "".join(refused.value.__notes__), few.metrics["val/accuracy"]


def test_ranks_check_their_own_batches(tmp_path):
    first, second = ranks(2, checked, tmp_path)
    assert first == second and first[:2] == (True, True)
