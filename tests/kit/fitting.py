"""Small runs by ``fit``: they learn three classes from four numbers, in six updates an epoch."""

import json

import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import fit, seed_everything
from tests.kit import saved as in_folder

QUIET = {"Progress": None, "Report": None, "MetricLogger": {"console": False}}
"""Handlers of a run that only trains."""
_generator = torch.Generator().manual_seed(5)
INPUTS = torch.randn(60, 4, generator=_generator)
TARGETS = torch.randint(3, (60,), generator=_generator)
TRAIN, VAL = (INPUTS[:48], TARGETS[:48]), (INPUTS[48:], TARGETS[48:])


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def net():
    seed_everything(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))


def fitted(directory, loss=loss_fn, train=TRAIN, val=VAL, **arguments):
    """A run of three epochs.

    ``arguments`` are those of ``fit``, and the settings of handlers by their names; ``...`` leaves one of ours out.
    """
    given = {"model": net(), "max_epochs": 3, "batch_size": 8, **arguments}
    given = {name: value for name, value in given.items() if value is not ...}
    entries = with_handlers(QUIET, {name: given.pop(name) for name in [*given] if name[0].isupper()})
    own = given.pop("handlers", [])
    own = {f"own {place}": each for place, each in enumerate(own)} if isinstance(own, list) else own
    given["handlers"] = {**entries, **own} if isinstance(own, dict) else own
    return fit(given.pop("model"), loss, train, val, directory=directory, **given)


def with_handlers(entries, others):
    """Entries of a config with further settings; None turns one off."""
    return entries | {
        name: value if value is None else {**(entries.get(name) or {}), **value} for name, value in others.items()
    }


def at(iteration, act):
    """``act(trainer)`` after this iteration: for ``handlers=[...]``."""
    return lambda trainer: act(trainer), Events.ITERATION_COMPLETED(once=iteration)


def stop(trainer):
    trainer.request_stop("enough")


def digest(run):
    """Of the weights at its end."""
    return run.summary["weights_sha256"]


def log(folder):
    """The lines of a run's log, without what is measured in seconds and bytes."""
    timed = ("memory/", "time/", "throughput/")
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]


def points(folder, key="loss"):
    """The iterations whose line has this value."""
    return [line["iteration"] for line in log(folder) if key in line]


def read(folder, name="summary"):
    """A JSON file of a run's folder."""
    return json.loads((folder / f"{name}.json").read_text())


def saved(folder):
    """The iterations of a run's checkpoints."""
    return in_folder.iterations(folder / "checkpoints")


def manifest(folder, iteration):
    return in_folder.manifest(folder / "checkpoints", iteration)
