"""The mistakes of a first hour: each is one line with its remedy, and nothing is lost."""

import errno
import multiprocessing
import os
import traceback

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Precision
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from ignite_engine import fit, load_weights
from ignite_engine.errors import CheckpointError, StateMismatch
from ignite_engine.handlers import EarlyStopping
from ignite_engine.runs.config import ConfigError
from tests.kit.fitting import INPUTS, TARGETS, TRAIN, VAL, at, digest, fitted, loss_fn, net, stop
from tests.kit.floors import of
from tests.kit.processes import start, wait_until
from tests.kit.refusals import refusals


def returning(change):
    return lambda folder: fitted(folder / "run", lambda model, batch: change(loss_fn(model, batch)))


def given(**arguments):
    return lambda folder: fitted(**{"directory": folder / "run", **arguments})


def again(first, second):
    """A run, then one of the same folder with other arguments."""

    def mistake(folder):
        fitted(folder / "run", **{"max_epochs": 1, **first})
        fitted(folder / "run", **second)

    return mistake


def weights(model, path, which):
    def load(folder):
        fitted(folder / "run", max_epochs=1)
        load_weights(model, folder / path, which)

    return load


class Samples(Dataset):
    """Number 11 is other than the rest."""

    def __init__(self, odd):
        self.odd = odd

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.odd() if index == 11 else (INPUTS[index], TARGETS[index])


def unreadable():
    raise OSError("no such picture")


def dies():
    if multiprocessing.parent_process() is not None:
        os._exit(3)
    return INPUTS[0], TARGETS[0]


class WithAnEvent:
    def attach(self, trainer, event):
        raise AssertionError("it has none")


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(INPUTS[0], TARGETS[0])] * 9)


def folder_below_a_file(folder):
    (folder / "file").write_text("")
    fitted(folder / "file" / "run")


def run_in_use(folder):
    held = folder / "held"

    def wait(trainer):
        held.touch()
        wait_until(lambda: not held.exists())

    process = start(lambda: fitted(folder / "run", handlers=[at(2, wait)]))
    try:
        wait_until(held.exists, process)
        fitted(folder / "run")
    finally:
        held.unlink()
        process.wait()


class Wide(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 5))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


ACCURACY = {"accuracy": Accuracy()}
test_loss_functions = refusals(
    [
        ("vector", returning(lambda loss: loss.expand(8)), ValueError, "loss_fn [8] mean"),
        ("float", returning(lambda loss: loss.item()), ValueError, "loss_fn float item()"),
        ("detached", returning(lambda loss: loss.detach()), ValueError, "requires_grad detach"),
        ("none", returning(lambda loss: None), (TypeError, ValueError), "loss_fn None return"),
        (
            "with logits",
            returning(lambda loss: (loss, loss.expand(3))),
            (TypeError, ValueError),
            "Tensor [3] {name:",
        ),
        ("by name", returning(lambda loss: {"loss": loss}), (TypeError, ValueError), "'loss' return"),
        ("three values", returning(lambda loss: (loss, 1, 2)), (TypeError, ValueError), "int, int pair"),
        (
            "criterion",
            lambda folder: fitted(folder / "run", nn.CrossEntropyLoss()),
            ConfigError,
            "CrossEntropyLoss write",
        ),
    ]
)
test_arguments = refusals(
    [
        ("a handler alone", given(handlers=print), ConfigError, "handlers list function"),
        (
            "event first",
            given(handlers=[(Events.EPOCH_COMPLETED, print)]),
            ConfigError,
            "handlers order print",
        ),
        ("handler's class", given(handlers=[EarlyStopping]), ConfigError, "handlers class EarlyStopping object"),
        ("no event", given(handlers=[WithAnEvent()]), ConfigError, "handlers WithAnEvent pair"),
        (
            "two parameters",
            given(handlers=[(lambda trainer, loss: None, Events.EPOCH_COMPLETED)]),
            ConfigError,
            "handlers 'trainer', 'loss'",
        ),
        ("epochs", given(epochs=3), ConfigError, "epochs did you mean 'max_epochs'?"),
        ("max_steps", given(max_steps=3), ConfigError, "max_steps did you mean 'max_iters'?"),
        ("train_loader", given(train_loader=3), ConfigError, "train_loader did you mean 'train_set'?"),
        ("callbacks", given(callbacks=[]), ConfigError, "callbacks handlers"),
        ("section's typo", given(distribted={}), ConfigError, "distribted did you mean 'distributed'?"),
        (
            "key's typo",
            given(Checkpoint={"keep_lst": 3}),
            ConfigError,
            "handlers.Checkpoint.keep_lst got 3 'keep_last'?",
        ),
        *of(
            "recovery",
            [("several forms", given(Checkpoint={"memory": 0}), ConfigError, "handlers.Checkpoint.memory got 0 auto")],
        ),
        ("no folder", given(directory=None), ConfigError, "directory path None"),
        ("number as folder", given(directory=5), ConfigError, "directory path 5"),
        ("no length", given(max_epochs=...), ConfigError, "max_iterations max_epochs"),
        ("optimizer's class", given(optimizer=torch.optim.SGD), ConfigError, "class SGD 'SGD' lambda"),
        ("optimizer's typo", given(optimizer="Adma"), ConfigError, "optimizer.name 'Adma' did you mean 'Adamax'?"),
        ("optimizer of another model", given(optimizer=sgd(net())), ValueError, "SGD no parameter parameters()"),
        ("schedule's typo", given(schedule="cosin"), ConfigError, "schedule.name 'cosin' did you mean 'cosine'?"),
        ("torch's plateau", given(schedule=plateau), ConfigError, "ReduceLROnPlateau metric 'plateau'"),
        ("precision's typo", given(precision="bf61"), ConfigError, "precision 'bf61' 'bf16'"),
        ("rate's type", given(resume={"lr": "x"}), ConfigError, "resume.lr: got 'x'"),
        ("rate's name", given(resume={"lrr": 0.1}), ConfigError, "resume.lrr did you mean 'lr'?"),
        ("resume's type", given(resume=0.25), ConfigError, "resume mapping"),
        (
            "no tokens_fn",
            given(Checkpoint={"every": {"tokens": 12}}),
            ConfigError,
            "handlers.Checkpoint.every tokens tokens_fn",
        ),
        ("batch size 0", given(batch_size=0), ConfigError, "batch_size: got 0, expected 1"),
        ("frozen model", given(model=net().requires_grad_(False)), ValueError, "optimizer empty parameter"),
    ]
)
test_metrics = refusals(
    [
        ("without a name", given(metrics=Accuracy()), ConfigError, "metrics Accuracy name"),
        ("class", given(metrics={"a": Accuracy}), ConfigError, "'a' class Accuracy"),
        (
            "best is a vector",
            given(metrics={"p": Precision()}, best="val/p", mode="max"),
            ValueError,
            "val/p list number",
        ),
        ("best's typo", given(metrics=ACCURACY, best="val/acuracy"), ConfigError, "'val/acuracy' 'val/accuracy'?"),
    ]
)
test_data = refusals(
    [
        ("other lengths", given(train=(INPUTS, TARGETS[:9])), ValueError, "train_set 60, 9 samples"),
        ("no training data", given(train=(INPUTS[:0], TARGETS[:0])), ConfigError, "'train_set' 0 samples"),
        ("no validation data", given(val=(INPUTS[:0], TARGETS[:0])), ConfigError, "'val' 0 samples"),
        ("generator", given(train=(x for x in [1])), (TypeError, ConfigError), "'train_set' generator DataLoader"),
        ("path", given(train="train.csv"), (TypeError, ConfigError), "'train_set' 'train.csv' read"),
        ("stream and a schedule", given(train=Endless(), schedule="cosine"), ConfigError, "how many updates set"),
        ("batch above n", given(batch_size=99, data={"drop_last": True}), ConfigError, "99 drop_last"),
    ]
)
test_folders_and_weights = refusals(
    [
        ("a file", given(directory="/dev/null"), ConfigError, "'/dev/null' not a folder"),
        ("below a file", folder_below_a_file, ConfigError, "directory not a folder"),
        ("in use", run_in_use, Exception, "in use by process directory"),
        ("of nothing", weights(net(), "nowhere", "last"), CheckpointError, "nowhere does not exist"),
        ("of another model", weights(Wide(), "run", "last"), StateMismatch, "not that of 2.weight"),
        ("no best", weights(net(), "run", "best"), (CheckpointError, FileNotFoundError), "no metric best"),
        ("to load", given(load=[{"path": "/nowhere"}]), ConfigError, "load /nowhere"),
        (
            "plan",
            given(load=[{"path": "x", "parts": ["model", "data"]}]),
            ConfigError,
            "load.0 'data' 'counters'",
        ),
    ]
)
test_second_starts = refusals(
    [
        ("other model", again({}, {"model": Wide()}), StateMismatch, "2.weight"),
        ("other optimizer", again({}, {"optimizer": "SGD"}), StateMismatch, "SGD AdamW"),
        ("other seed", again({}, {"seed": 4}), ValueError, "seed 0 4"),
        ("less data", again({}, {"train": VAL}), ValueError, "samples 48 12"),
        ("part that went", again({"EMA": {"decay": 0.9}}, {}), StateMismatch, "'ema' ignore"),
        ("other rate's name", again({}, {"resume": {"lr": {"optimzer": 1.0}}}), ValueError, "did you mean 'optimizer'"),
        ("strict", again({}, {"Checkpoint": {"strict": True}, "run": {"threads": 2}}), ValueError, "bit for bit"),
    ]
)


@pytest.mark.row("F10")
@pytest.mark.parametrize(
    "wrong", [{"seed": 4}, {"optimizer": "SGD"}, {"resume": {"lr": "fast"}}, {"resume": {"lr": {"optimzer": 1.0}}}]
)
@pytest.mark.parametrize("is_finished", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_start_that_is_refused_leaves_the_folder_as_it_was(wrong, is_finished, tmp_path):
    fitted(tmp_path, handlers=[] if is_finished else [at(4, stop)])
    names = ("config.yaml", "environment.json", "summary.json", "starts.jsonl", "metrics.jsonl")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    with pytest.raises(ValueError):
        fitted(tmp_path, **wrong)
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    assert fitted(tmp_path).summary["iteration"] == 18


IN_THE_USERS_CODE = {
    "shapes": (given(train=(torch.ones(48, 5), TARGETS[:48]), val=None), ("multiplied", "Tensor [8, 5] float32")),
    "float64": (given(train=(INPUTS[:48].double(), TARGETS[:48]), val=None), ("dtype", "Tensor [8, 4] float64")),
    "predict": (
        given(metrics=ACCURACY, predict=lambda model, batch: model(batch["x"])),
        ("indices", "Tensor [8, 4] float32", "predict(model, batch)"),
    ),
    "sample that is None": (given(train=Samples(lambda: None), val=None), ("NoneType", "Tensor [4]", "of Samples")),
    "ragged samples": (
        given(train=Samples(lambda: (INPUTS[11, :2], TARGETS[11])), val=None),
        ("Tensor [2]", "Tensor [4]", "of Samples"),
    ),
    "unreadable sample": (given(train=Samples(unreadable), val=None), ("no such picture", "Samples[11]")),
    "in a worker": (given(train=Samples(unreadable), val=None, num_workers=1), ("no such picture", "Samples[11]")),
    "dead worker": (given(train=Samples(dies), val=None, num_workers=1), ("worker", "exited unexpectedly")),
}
"""Errors with the user's frames, and what is noted below them."""


@pytest.mark.parametrize("name", IN_THE_USERS_CODE)
def test_an_error_in_the_users_code_says_with_what(name, tmp_path):
    mistake, words = IN_THE_USERS_CODE[name]
    with pytest.raises(Exception) as raised:
        mistake(tmp_path)
    text = "".join(traceback.format_exception(raised.value))
    assert not [word for word in words if word not in text], text
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


def test_a_full_disk_and_a_loss_that_is_not_a_number_lose_nothing(tmp_path, monkeypatch):
    sync, failed, calls = os.fsync, [], []

    def full_at_the_first_save(descriptor):
        if calls and not failed:
            failed.append(descriptor)
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    def nan_once(model, batch):
        calls.append(len(calls))
        return loss_fn(model, batch) * (float("nan") if len(calls) == 6 else 1.0)

    monkeypatch.setattr(os, "fsync", full_at_the_first_save)
    run = fitted(tmp_path, nan_once, update={"non_finite": "skip"}, val=None)
    assert failed and run.summary["status"] == "completed" and digest(run)
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count("No space left on device") == 1 and "is nan" in log


def test_a_handler_is_attached_to_a_trainer(tmp_path):
    run = fit(net(), loss_fn, TRAIN, directory=tmp_path, max_iters=1, handlers={"Report": None})
    with pytest.raises(TypeError, match="Engine, got a Run"):
        EarlyStopping("val/loss", patience=3).attach(run)
