"""A wrong metric or ``predict`` ends a run before it trains; a right one leaves no trace of the check."""

import gc
import json
import random
import time
import weakref
from typing import Any

import ignite.distributed as idist
import numpy as np
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, EpochMetric, Loss, Metric, MetricsLambda
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from ignite_engine import fit
from ignite_engine.config import ConfigError
from tests.kit.fitting import QUIET, TRAIN, VAL, loss_fn, net
from tests.kit.tiny import on_two_ranks


def trained(directory, **arguments):
    given = {"max_epochs": 1, "batch_size": 4, **QUIET, **arguments}
    return fit(
        given.pop("model", None) or net(),
        given.pop("loss_fn", loss_fn),
        TRAIN,
        given.pop("val_set", VAL),
        directory=directory,
        **given,
    )


def predict(model, batch):
    return model(batch[0]), batch[1]


def refuse_to_train(trainer):
    raise AssertionError("it trains")


UNTRAINED = [(refuse_to_train, Events.ITERATION_STARTED)]


class Broken(Metric):
    """A metric of the user's own with a mistake in it."""

    def reset(self):
        self.total = 0

    def update(self, output):
        self.total += output["logits"]

    def compute(self):
        return float(self.total)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"metrics": {"accuracy": Accuracy(is_multilabel=True)}},
            r"^fit\(\): the metric 'accuracy' \(Accuracy\) cannot use what predict returned for 'val', \(Tensor \[4, "
            r"3\] float32, Tensor \[4\] int64\): ValueError: .* Let predict\(model, batch\) return what the",
        ),
        (
            {"metrics": {"accuracy": Accuracy()}, "predict": lambda model, batch: model(batch[0])},
            r"^fit\(\): the metric 'accuracy' .* returned for 'val', Tensor \[4, 3\] float32: ValueError",
        ),
        (
            {"metrics": {"twice": MetricsLambda(lambda value: 2 * value, Accuracy(is_multilabel=True))}},
            r"^fit\(\): the metric Accuracy cannot use what predict returned",
        ),
        (
            {"metrics": {"own": Broken()}},
            r"^fit\(\): the metric 'own' \(Broken\) cannot use .* TypeError: tuple indices",
        ),
    ],
)
def test_wrong_part_of_an_evaluation_ends_the_run_before_it_trains(tmp_path, arguments, words, capsys):
    began = time.monotonic()
    with pytest.raises(ConfigError, match=words) as refusal:
        trained(tmp_path, handlers=UNTRAINED, **arguments)
    assert "terminating" not in capsys.readouterr().err
    assert "\n" not in str(refusal.value) and time.monotonic() - began < 30
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["iteration"]) == ("failed", 0)


def test_error_of_predict_is_raised_as_it_was_and_says_what_it_must_return(tmp_path):
    def wrong(model, batch):
        return model(batch["x"]), batch["y"]

    with pytest.raises(TypeError, match="list indices") as refusal:
        trained(tmp_path, metrics={"accuracy": Accuracy()}, predict=wrong, handlers=UNTRAINED)
    notes = refusal.value.__notes__
    assert "The batch: [Tensor [4, 4] float32, Tensor [4] int64]." in notes
    assert any("sanity check of 'val', before training: predict(model, batch) must return" in note for note in notes)


class Counting(Dataset[Any]):
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
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("drawn", torch.zeros(3))
        self.modes = []

    def forward(self, inputs):
        self.calls += 1
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
    runs, models, sets = list[Any](), list[Any](), list[Counting]()
    for batches in (0, 2):
        models.append(Tracing())
        sets.append(Counting())
        runs.append(
            trained(
                tmp_path / str(batches),
                model=models[-1],
                val_set=sets[-1],
                metrics={"accuracy": Remembering(), "nll": Loss(nn.functional.cross_entropy)},
                evaluation={"sanity_batches": batches},
            )
        )

    without, checked = runs
    assert sets[1].read == sets[0].read + 8  # it happened
    assert models[1].modes == [False] * 2 + models[0].modes
    assert checked.summary["weights_sha256"] == without.summary["weights_sha256"]  # buffers are in it
    assert checked.metrics == without.metrics and checked.metrics["val/accuracy"] > 1
    assert {path.name for path in checked.directory.path.rglob("*")} == {
        path.name for path in without.directory.path.rglob("*")
    }
    lines = [(run.directory.path / "metrics.jsonl").read_text() for run in runs]
    assert lines[0] == lines[1]
    assert checked.trainer.state.evaluations == without.trainer.state.evaluations == 1


class Centered(nn.Module):
    """A loss function that moves a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def forward(self, model, batch):
        predictions = model(batch[0])
        self.center = 0.9 * self.center + 0.1 * predictions.detach().mean(dim=0)
        return nn.functional.cross_entropy(predictions - self.center, batch[1])


def test_loss_function_and_generator_of_a_loader_are_as_before_it(tmp_path):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*VAL)
    order = RandomSampler(data, replacement=True, generator=generator)
    loss, before, seen = Centered(), generator.get_state(), list[bool]()

    def look(trainer):
        seen.append(torch.equal(generator.get_state(), before) and not loss.center.any())

    trained(
        tmp_path,
        loss_fn=loss,
        val_set=DataLoader(data, 4, sampler=order, generator=generator),
        handlers=[(look, Events.STARTED)],
    )
    assert seen == [True]


@pytest.mark.slow
def test_it_keeps_no_output(tmp_path):
    outputs, alive = list[Any](), list[bool]()

    def predict_and_note(model, batch):
        predictions, targets = predict(model, batch)
        outputs.append(weakref.ref(predictions))
        return predictions, targets

    def look(trainer):
        gc.collect()
        alive.extend(output() is not None for output in outputs)

    handlers = [(look, Events.EPOCH_STARTED)]
    trained(tmp_path, predict=predict_and_note, metrics={"accuracy": Accuracy()}, handlers=handlers)
    assert alive == [False, False]


def test_resumed_run_is_not_checked_again(tmp_path):
    trained(tmp_path)
    data = Counting()
    trained(tmp_path, val_set=data, max_epochs=2)
    assert data.read == 12  # the evaluation of the second epoch


class ReadOnce(IterableDataset[Any]):
    """A stream whose samples are gone when they are read."""

    def __init__(self):
        self.samples = iter(list(zip(*VAL, strict=True)))

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.samples)


class Stored(IterableDataset[Any]):
    """Each pass goes on with the same iterator."""

    def __init__(self):
        self.samples = iter(TensorDataset(*VAL))

    def __iter__(self):
        return self.samples


class OwnIterator(DataLoader[Any]):
    """A loader that is its own iterator."""

    def __init__(self):
        super().__init__(TensorDataset(*VAL), 4)
        self.batches = super().__iter__()

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


class StoredBatches:
    """A loader of batches that is not torch's."""

    batch_size = 4

    def __init__(self):
        self.batches = iter(DataLoader(TensorDataset(*VAL), 4))

    def __iter__(self):
        return self.batches


@pytest.mark.parametrize("kind", [ReadOnce, Stored, OwnIterator, StoredBatches, lambda: DataLoader(Stored(), 4)])
def test_stream_that_can_be_read_once_is_left_to_its_evaluation(tmp_path, caplog, kind):
    values = [
        trained(tmp_path / name, val_set=val_set, evaluation={"every": None}).metrics["val/loss"]
        for name, val_set in {"once": kind(), "set": VAL}.items()
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    lines = [line for line in caplog.messages if "is not tried before training" in line]
    assert lines == ["'val' is not tried before training: what is read of it is gone for its evaluations."]


def needs_each_class(predictions, targets):
    if len(set(targets.tolist())) < 3:
        raise ValueError("only some of the classes are there")
    return 1.0


def test_metric_that_needs_more_than_a_few_batches_is_not_refused(tmp_path):
    order = torch.argsort(VAL[1])
    ordered = (VAL[0][order], VAL[1][order])
    run = trained(
        tmp_path / "right",
        val_set=ordered,
        batch_size=1,
        metrics={"all": EpochMetric(needs_each_class, check_compute_fn=False)},
    )
    assert run.metrics["val/all"] == 1.0


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_check_their_own_batches(tmp_path):
    def case(rank):
        torch.set_num_threads(1)
        known_as = set[tuple[int, int]]()

        def predict_and_note(model, batch):
            known_as.add((idist.get_rank(), idist.get_world_size()))
            return predict(model, batch)

        runs = [
            trained(
                tmp_path / str(batches),
                metrics={"accuracy": Accuracy(), "all": EpochMetric(needs_each_class, check_compute_fn=False)},
                predict=predict_and_note,
                evaluation={"sanity_batches": batches},
            )
            for batches in (0, 1)
        ]
        try:
            trained(tmp_path / "wrong", metrics={"accuracy": Accuracy(is_multilabel=True)}, handlers=UNTRAINED)
            refused = "not"
        except Exception as error:
            refused = str(error)
        few = trained(tmp_path / "few", val_set=(VAL[0][:1], VAL[1][:1]), metrics={"accuracy": Accuracy()})
        digests = [run.summary["weights_sha256"] for run in runs]
        return {
            "same": digests[0] == digests[1] and runs[0].metrics == runs[1].metrics,
            "refused": refused,
            "few": few.metrics["val/accuracy"],
            "knows itself": known_as == {(rank, 2)},
        }

    answers = on_two_ranks(case, tmp_path / "meeting")
    assert answers["same"] == [True, True]
    assert all("metric 'accuracy' (Accuracy) cannot use" in refused for refused in answers["refused"])
    assert answers["few"][0] == answers["few"][1]
    assert answers["knows itself"] == [True, True]
