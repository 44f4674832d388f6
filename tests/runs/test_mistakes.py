"""The mistakes of a first hour: each is one line with its remedy."""

import errno
import multiprocessing
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Precision
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import ignite_engine
from ignite_engine import fit, load_weights
from ignite_engine.config import ConfigError
from ignite_engine.handlers import EarlyStopping
from ignite_engine.run_directory import RunDirectory
from tests.runs.test_fit import INPUTS, QUIET, TARGETS, TRAIN, VAL, loss_fn, net

Mistake = tuple[Callable[[Path], Any], str]
OURS = (
    str(Path(ignite_engine.__file__).parent) + "/",
    str(Path(ignite_engine.__file__).resolve().parents[1] / "handlers"),
)


def run_of(folder, loss=loss_fn, train=TRAIN, val=VAL, **arguments):
    given = {"model": net(), "directory": folder / "run", "max_epochs": 1, "batch_size": 8, **QUIET, **arguments}
    given = {name: value for name, value in given.items() if value is not ...}
    return fit(given.pop("model"), loss, train, val, **given)


def returning(change):
    return lambda folder: run_of(folder, lambda model, batch: change(loss_fn(model, batch)))


def given(**arguments):
    return lambda folder: run_of(folder, **arguments)


def twice(first, second):
    def again(folder):
        run_of(folder, **{"max_epochs": 1, **first})
        return run_of(folder, **{"max_epochs": 2, **second})

    return again


class Samples(Dataset[Any]):
    """One of them is other than the rest."""

    def __init__(self, odd):
        self.odd = odd

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return (INPUTS[index], TARGETS[index]) if index != 11 else self.odd()


def unreadable():
    raise OSError("no such picture")


def dies():
    if multiprocessing.parent_process() is not None:
        os._exit(3)
    return INPUTS[0], TARGETS[0]


class WithAnEvent:
    def attach(self, trainer, event):
        raise AssertionError("it has none")


class Endless(IterableDataset[Any]):
    def __iter__(self):
        return iter([(INPUTS[0], TARGETS[0])] * 9)


def a_file(folder):
    (folder / "file").write_text("")
    return folder / "file" / "run"


def in_use(folder):
    def hold():
        with RunDirectory(folder / "run").held():
            held.set()
            end.wait()

    context = multiprocessing.get_context("fork")
    held, end = context.Event(), context.Event()
    other = context.Process(target=hold)
    other.start()
    try:
        assert held.wait(60)
        return run_of(folder)
    finally:
        end.set()
        other.join()


def weights(model, path, which):
    def load(folder):
        run_of(folder)
        load_weights(model(), folder / path, which)

    return load


def other_net():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 5))


MISTAKES = {
    # what the loss function returns
    "vector loss": (
        returning(lambda loss: loss.expand(8)),
        r"loss_fn returned a loss of shape \(8,\): return a tensor of",
    ),
    "float loss": (
        returning(lambda loss: loss.item()),
        r"loss_fn returned the number .* without item\(\) or float\(\)",
    ),
    "detached loss": (
        returning(lambda loss: loss.detach()),
        r"depends on no parameter with requires_grad: .*without detach",
    ),
    "no loss": (returning(lambda loss: None), r"loss_fn returned None: return the mean loss"),
    "loss and logits": (
        returning(lambda loss: (loss, loss.expand(3))),
        r"returned \(loss, Tensor\): return \(loss, {name:",
    ),
    "loss by name": (
        returning(lambda loss: {"loss": loss}),
        r"losses by name, .* with 'loss' among them: return the loss",
    ),
    "three values": (
        returning(lambda loss: (loss, 1, 2)),
        r"loss_fn returned a tuple of 3: return the loss, \(loss, {",
    ),
    "criterion as loss_fn": (
        lambda folder: run_of(folder, nn.CrossEntropyLoss()),
        r"got CrossEntropyLoss, .*: write one that",
    ),
    # arguments
    "a handler alone": (given(handlers=print), r"handlers must be a list of handlers, got a builtin_function"),
    "an event before its handler": (
        given(handlers=[(Events.EPOCH_COMPLETED, print)]),
        r"handlers\[0\] must be an object .* and its event, in this order, got Events.EPOCH_COMPLETED",
    ),
    "a handler's class": (given(handlers=[EarlyStopping]), r"handlers\[0\] is the class EarlyStopping: give an object"),
    "a handler without its event": (
        given(handlers=[WithAnEvent()]),
        r"handlers\[0\] is a WithAnEvent, whose attach takes an event: give the pair of them\.$",
    ),
    "a handler of two parameters": (
        given(handlers=[(lambda trainer, loss: None, Events.EPOCH_COMPLETED)]),
        r"handlers\[0\] must be a function of the trainer, or of nothing, got <lambda>\(trainer, loss\): trainer\.st",
    ),
    "epochs": (given(epochs=3), r"fit\(\) got epochs, which it does not take; did you mean 'max_epochs'\?"),
    "a value of several forms": (given(checkpoint={"memory": 0}), r"memory: got 0, expected at least 1 or 'auto'\."),
    "max_steps": (given(max_steps=3), r"fit\(\) got max_steps, which it does not take; did you mean 'max_iters'\?$"),
    "train_loader": (given(train_loader=3), r"fit\(\) got train_loader, .* take; did you mean 'train_set'\?$"),
    "callbacks": (given(callbacks=[]), r"fit\(\) got callbacks, which it does not take; known: .*handlers"),
    "no folder": (given(directory=None), r"directory must be the path of the run's folder, got None\.$"),
    "number as folder": (given(directory=5), r"directory must be the path of the run's folder, got 5\.$"),
    "folder with a NUL": (
        given(directory="a\0b"),
        r"directory must be a path without a NUL character, got 'a\\x00b'\.$",
    ),
    "data without a dimension": (
        given(train=torch.tensor(1.0)),
        r"train_set must have samples along its first dimension, got Tensor \[\] float32\.$",
    ),
    "column without a dimension": (
        given(train=(INPUTS, torch.tensor(1.0))),
        r"train_set must have samples along its first dimension, got \(.*Tensor \[\] float32\)\.$",
    ),
    "no length": (given(max_epochs=...), r"fit\(\): run: expected one of max_iterations and max_epochs, or both"),
    "optimizer's class": (
        given(optimizer=torch.optim.SGD),
        r"optimizer is the class SGD: give its name, 'SGD', or lambda",
    ),
    "optimizer's typo": (given(optimizer="Adma"), r"optimizer\.name: got 'Adma', .*did you mean 'Adamax'\?"),
    "optimizer of another model": (
        given(optimizer=torch.optim.SGD(net().parameters(), lr=0.1)),
        r"optimizer \(SGD\) holds no parameter of the model, .*: make it from the parameters\(\) of the model",
    ),
    "schedule's typo": (given(schedule="cosin"), r"schedule\.name: got 'cosin', .*did you mean 'cosine'\?"),
    "key's typo": (given(checkpoint={"keep_lst": 3}), r"checkpoint\.keep_lst: got 3 .*mean 'keep_last'\?"),
    "section's typo": (
        given(chekpoint={}),
        r"fit\(\) got chekpoint, which it does not take; did you mean 'checkpoint'\?",
    ),
    "precision's typo": (given(precision="bf61"), r"precision: got 'bf61', expected 'fp32', 'bf16' or 'fp16'"),
    "plateau of torch": (
        given(schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)),
        r"schedule: got a ReduceLROnPlateau, which follows a metric: give {'name': 'plateau'",
    ),
    # metrics
    "metric without a name": (
        given(metrics=Accuracy()),
        r"metrics that are a Accuracy: give them by name, such as {'acc",
    ),
    "metric's class": (
        given(metrics={"a": Accuracy}),
        r"metrics with 'a': the class Accuracy, expected a name and a metric",
    ),
    "wrong metric": (
        given(metrics={"a": Accuracy(is_multilabel=True)}),
        r"the metric 'a' \(Accuracy\) cannot use what predict returned .* Let predict\(model, batch\) return what",
    ),
    "predict of one value": (
        given(metrics={"a": Accuracy()}, predict=lambda model, batch: model(batch[0])),
        r"the metric 'a' \(Accuracy\) cannot use what predict returned .*Tensor \[8, 3\] float32",
    ),
    "best that is a vector": (
        given(metrics={"precision": Precision()}, best="val/precision"),
        r"val/precision is a list, expected a metric that is one number: give",
    ),
    "best's typo": (
        given(metrics={"accuracy": Accuracy()}, best="val/acuracy"),
        r"best: got 'val/acuracy', expected a metric of this run; did you mean 'val/accuracy'\?",
    ),
    # data
    "x and y of other lengths": (
        given(train=(INPUTS, TARGETS[:9])),
        r"train_set has columns of 60, 9 samples: give as many",
    ),
    "no train data": (given(train=(INPUTS[:0], TARGETS[:0])), r"the data 'train_set' has 0 samples"),
    "no validation data": (given(val=(INPUTS[:0], TARGETS[:0])), r"the data 'val' has 0 samples"),
    "generator": (
        given(train=(x for x in [1])),
        r"'train_set' is a generator, expected .* a DataLoader, or an IterableDat",
    ),
    "a path": (
        given(train="train.csv"),
        r"the data 'train_set' is 'train\.csv', expected samples: read what it names first\.$",
    ),
    "stream with a schedule": (
        given(train=Endless(), schedule="cosine"),
        r"DataLoader does not say how many updates .*: set",
    ),
    "batch size 0": (given(batch_size=0), r"batch_size: got 0, expected at least 1"),
    "batch size above n": (
        given(batch_size=99, data={"drop_last": True}),
        r"batch_size: got 99, .*drop_last leaves none",
    ),
    # the model
    "frozen model": (
        given(model=net().requires_grad_(False)),
        r"no parameter that requires a gradient, .*: unfreeze what",
    ),
    # the folder
    "folder that is a file": (
        given(directory="/dev/null"),
        r"directory: got '/dev/null', but /dev/null is not a folder",
    ),
    "folder that cannot be made": (
        lambda folder: run_of(folder, directory=a_file(folder)),
        r"directory: .* is not a folder",
    ),
    "folder where none can be": (
        given(directory="/proc/x/y"),
        r"directory: got '/proc/x/y', but (it cannot be made: .*|/proc may not be written to)\.$",
    ),
    "folder in use": (
        in_use,
        r"^/.*/run is in use by process \d+ on .*; wait until it has ended, or give another directory \(config: ",
    ),
    "load_weights of nothing": (weights(net, "nowhere", "last"), r"nowhere does not exist; expected a run's folder or"),
    "load_weights of another model": (
        weights(other_net, "run", "last"),
        r"The model is not that of .*: build it as it w",
    ),
    "load_weights of no best": (
        weights(net, "run", "best"),
        r"no metric was followed, so none is the best; train",
    ),
    "weights of nothing": (given(checkpoint={"load": {"path": "/nowhere"}}), r"checkpoint\.load\.path: .*/nowhere"),
    # of a resume that has nothing to resume yet
    "rate's type": (given(resume={"lr": "x"}), r"resume\.lr: got 'x'"),
    "rate's name": (given(resume={"lrr": 0.1}), r"resume\.lrr: .* did you mean 'lr'\?$"),
    # again, with something else
    "other model": (twice({}, {"model": other_net()}), r"'2\.weight'.* \(5, 8\)|2\.weight"),
    "other optimizer": (
        twice({}, {"optimizer": "SGD"}),
        r"The optimizer is SGD and the saved one was AdamW: build that one, or leave it out with",
    ),
    "other batch size": (
        twice({}, {"batch_size": 4}),
        r"made with batch_size 8 in its data, now it is 4: make them equal",
    ),
    "other seed": (twice({}, {"seed": 4}), r"made with seed 0 in its data, now it is 4: make them equal"),
    "less data": (twice({}, {"train": VAL}), r"made with samples 48 in its data, now it is 12: make them equal"),
}
"""Refusals: by name, what the user does and the line."""

IN_THE_USERS_CODE = {
    "shapes": (
        given(train=(torch.ones(48, 5), TARGETS[:48]), val=None),
        r"shapes cannot be multiplied(.|\n)*The micro-batch: \[Tensor \[8, 5\] float32, Tensor \[8\] int64\]\.",
    ),
    "float64 data": (
        given(train=(INPUTS[:48].double(), TARGETS[:48]), val=None),
        r"same dtype(.|\n)*The micro-batch: \[Tensor \[8, 4\] float64, Tensor \[8\] int64\]\.",
    ),
    "wrong predict": (
        given(metrics={"a": Accuracy()}, predict=lambda model, batch: (model(batch["x"]), batch["y"])),
        r"list indices(.|\n)*The batch: \[Tensor \[8, 4\] float32(.|\n)*predict\(model, batch\) must return what",
    ),
    "sample that is None": (
        given(train=Samples(lambda: None), val=None),
        r"default_collate(.|\n)*Samples\[11\] is NoneType and Samples\[\d+\] is \(Tensor \[4\] float32, Tensor",
    ),
    "ragged samples": (
        given(train=Samples(lambda: (INPUTS[11, :2], TARGETS[11])), val=None),
        r"(.|\n)*Samples\[11\] is \(Tensor \[2\] float32, Tensor \[\] int64\) and Samples\[\d+\] is \(Tensor \[4\]",
    ),
    "sample that cannot be read": (
        given(train=Samples(unreadable), val=None),
        r"no such picture(.|\n)*Raised for Samples\[11\]\.",
    ),
    "the same in a worker": (
        given(train=Samples(unreadable), val=None, num_workers=1),
        r"no such picture(.|\n)*Raised for Samples\[11\]\.",
    ),
    "dead worker": (
        given(train=Samples(dies), val=None, num_workers=1),
        r"(.|\n)*A worker that reads Samples is gone; it read one of the batches 0 to 2 of the epoch\. num_w",
    ),
}
"""Errors with the user's frames, and what is noted below them."""


def raised_by(mistake, folder):
    try:
        mistake(folder)
    except Exception as error:
        return error, "".join(traceback.format_exception(error))
    raise AssertionError("nothing was raised")


def our_frames(text):
    return [file for file in re.findall(r'^  File "([^"]+)"', text, flags=re.MULTILINE) if file.startswith(OURS)]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line(name, tmp_path):
    mistake, line = MISTAKES[name]
    error, text = raised_by(mistake, tmp_path)
    assert re.search(line, str(error)), error
    assert "\n" not in str(error).strip()
    if isinstance(error, ConfigError):
        assert len(our_frames(text)) <= 2


@pytest.mark.parametrize("name", IN_THE_USERS_CODE)
def test_error_in_the_users_code_says_with_what(name, tmp_path):
    mistake, words = IN_THE_USERS_CODE[name]
    _, text = raised_by(mistake, tmp_path)
    assert re.search(words, text), text
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "trainer.py" in log  # the whole traceback


@pytest.mark.parametrize("metric", [torch.tensor(2.0), 2])
def test_forgotten_item_loses_nothing(metric, tmp_path):
    def note(trainer):
        trainer.state.metrics["mine"] = metric

    run = run_of(tmp_path, handlers=[(note, Events.EPOCH_COMPLETED)])
    assert run.metrics["mine"] == 2.0 and run.summary["status"] == "completed"


def test_full_disk_and_a_loss_that_is_not_a_number_lose_nothing(tmp_path, monkeypatch):
    sync, failed = os.fsync, False

    def full_at_the_first_save(descriptor):
        nonlocal failed
        if calls and not failed:
            failed = True
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full_at_the_first_save)
    calls = []

    def nan_once(model, batch):
        calls.append(len(calls))
        return loss_fn(model, batch) * (float("nan") if len(calls) == 6 else 1.0)

    run = run_of(tmp_path, nan_once, max_epochs=2, update={"non_finite": "skip"}, val=None)

    assert failed and run.summary["status"] == "completed"
    said = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert said.count("No space left on device") == 1 and "is nan: its step is skipped (1 of at most 10)" in said


def test_handler_is_attached_to_the_wrong_object(tmp_path):
    run = run_of(tmp_path)
    with pytest.raises(TypeError, match=r"Trainer"):
        EarlyStopping("val/loss", patience=3).attach(run)
