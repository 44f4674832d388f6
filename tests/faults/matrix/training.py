"""The training process of a case: everything attached, stopped where the case says, its result written to a file."""

import json
import logging
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, loader, rng
from ignite_engine.checkpointing.digests import digests
from ignite_engine.data.source import DataSource
from ignite_engine.handlers import (
    EMA,
    Checkpoint,
    EarlyStopping,
    Evaluation,
    GracefulStop,
    LRSchedule,
    MetricLogger,
    sinks,
    warmup_cosine,
)
from ignite_engine.run_directory import weights_sha256
from ignite_engine.states.model_and_optimizer import OptimizerState
from ignite_engine.step.precision import LossScaler
from tests.faults.matrix.cases import Setup
from tests.faults.matrix.data import WORDS, Samples

EPOCHS = 5
# samples, batch size, batches of one update
SIZES = {"single": (22, 6, None), "even": (24, 2, 3), "short last": (22, 2, 3)}
ITERATIONS_PER_EPOCH = 4


class Net(nn.Module):
    """An embedding whose gradient may be sparse, a BatchNorm that changes in forward, and dropout."""

    def __init__(self, *, sparse):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, inputs):
        words, features = inputs
        logits = self.layers(torch.cat([self.words(words).mean(1), features], 1))
        return logits


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def predict(model, batch):
    return model(batch[0]).float(), batch[1]


def train(setup, run):
    """Train in ``run["folder"]``, resuming what is there; writes ``end.json`` if it finishes.

    Args:
        setup: of :class:`Setup`.
        run: ``folder``; ``workers``, ``background`` and ``progress`` as in a case; ``every``, iterations between saves;
            ``stop``: None, or ``how`` and ``at``, the iteration, or None for the second epoch's evaluation; ``forget``:
            None, or what is not restored, to show that the comparison detects it.
    """
    what, folder = Setup(**setup), Path(run["folder"])
    if run["forget"] is not None:
        for owner, method in FORGOTTEN[run["forget"]]:
            setattr(owner, method, lambda *_: None)
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    # a resumed run must not depend on how its process was seeded
    seed = 1 if not any((folder / "checkpoints").glob("iteration_*")) else 1000 + os.getpid()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    trainer, evaluator = build(what, folder, run["progress"])
    strict = what.loader != "stateful" or run["workers"] == "0"
    checkpoint = Checkpoint(
        folder / "checkpoints", keep_last=2, best="val/loss", background=run["background"], strict=strict
    )
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=run["every"]))
    GracefulStop().attach(trainer)
    if run["stop"] is not None:
        Stop(folder, **run["stop"]).attach(trainer, evaluator)
    checkpoint.resume()
    trainer.run(data_of(what, run["workers"]), max_epochs=EPOCHS)
    (folder / "end.json").write_text(json.dumps(end_of(trainer)))
    return 0


def build(setup, folder, resumes):
    sparse = setup.optimizers == "dense and sparse"
    model = Net(sparse=sparse)
    dense = torch.optim.AdamW(model.layers.parameters() if sparse else model.parameters(), lr=0.01)
    optimizers = {"dense": dense}
    if sparse:
        optimizers["sparse"] = torch.optim.SparseAdam(model.words.parameters(), lr=0.01)
    fp16 = setup.precision == "fp16"
    # overflows until the scale is small enough, and then again, as it doubles every second step
    scaler = {"init_scale": 2.0**20, "growth_interval": 2} if fp16 else None
    update = Update(model, optimizers, loss_fn, precision=setup.precision, clip_norm=1.0, grad_scaler=scaler)
    trainer = Trainer(update, accumulation_steps=SIZES[setup.groups][2])
    for name, optimizer in optimizers.items():
        LRSchedule(warmup_cosine(optimizer, warmup=3, total=20), name=name).attach(trainer)
    if setup.ema:
        EMA(0.8).attach(trainer)
    metrics = {"loss": Loss(nn.functional.cross_entropy), "accuracy": Accuracy()}
    evaluator = create_evaluator(model, predict, metrics, precision=setup.precision)
    validation = loader(Samples(9, "drawn"), 2, seed=5)
    Evaluation(evaluator, validation, resumes=resumes).attach(trainer)
    if setup.early_stopping:
        EarlyStopping("val/loss", patience=3, min_delta=1e6).attach(trainer)
    # so that a stop can fall within a log interval, and a rewind leaves lines to be cut off
    MetricLogger(folder, console=False).attach(
        trainer, Events.ITERATION_COMPLETED(event_filter=lambda engine, iteration: iteration % 3 != 0)
    )
    return trainer, evaluator


def data_of(setup, workers):
    samples, batch_size, _ = SIZES[setup.groups]
    dataset = Samples(samples, setup.augmentation)
    options = {}
    if workers != "0":
        # started once for all epochs: a spawned one imports torch
        options = {"num_workers": 2, "multiprocessing_context": workers, "persistent_workers": workers != "fork"}
        torch.multiprocessing.set_forkserver_preload(["tests.faults.matrix.data", "ignite_engine.data"])
    if setup.loader == "ours":
        return loader(dataset, batch_size, shuffle=True, seed=2, **options)
    if setup.loader == "plain":
        return DataLoader(dataset, batch_size, shuffle=True, **options)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, batch_size, shuffle=True, **options)


def end_of(trainer):
    """All that must equal the uninterrupted run: weights, and digests of each part of a checkpoint."""
    shared, local = trainer.registry.capture()
    parts = digests({**shared, **local, "random": rng.capture()})
    del parts["trainer.checkpoints"]  # a stop adds one
    rates = {name: each.param_groups[0]["lr"] for name, each in trainer.update.optimizers.items()}
    state = trainer.state
    return {
        "weights": weights_sha256(trainer.update.model),
        "parts": parts,
        "lr": rates,
        "state": [state.iteration, state.epoch, state.status, state.reason, state.optimizer_steps],
        "skipped_steps": state.skipped_steps,
        "metrics": {name: repr(value) for name, value in state.metrics.items()},
    }


# what restores each part of a checkpoint; without any of them some case must fail
FORGOTTEN = {
    "random numbers": [(rng, "restore")],
    "position in the data": [(DataSource, "load_state_dict")],
    "scaler": [(LossScaler, "load_state_dict")],
    "optimizer": [(OptimizerState, "load_state_dict")],
    "schedule": [(LRSchedule, "load_state_dict")],
    "average": [(EMA, "load_state_dict")],
    "early stopping": [(EarlyStopping, "load_state_dict")],
    "evaluation": [(Evaluation, "load_state_dict")],
    "best score": [(Checkpoint, "load_state_dict")],
    "interval of the log": [(MetricLogger, "load_state_dict")],
    "log on disk": [(sinks.JSONLSink, "load_state_dict"), (sinks.LogFile, "drop_from")],
}


class Stop:
    """Ends this process where the case says, after recording that it does.

    Args:
        how: ``stop``, ``kill`` or ``rewind``.
        at: the iteration; None: in the evaluation at the end of the second epoch.
    """

    def __init__(self, folder, how, at):
        self.folder, self.how, self.at = folder, how, at

    def attach(self, trainer, evaluator):
        if self.at is None:
            evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=2), self._in_evaluation, trainer)
        elif self.how == "stop":
            trainer.add_event_handler(Events.ITERATION_STARTED(once=self.at), self._strike, trainer)
        elif self.how == "rewind":
            trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED(once=self.at), self._strike, trainer)
        else:
            trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, self._after_the_save)

    def _in_evaluation(self, trainer):
        if trainer.state.iteration == 2 * ITERATIONS_PER_EPOCH:
            self._strike(trainer)

    def _after_the_save(self, trainer):
        if trainer.state.saved_iteration == self.at:
            self._strike(trainer)

    def _strike(self, trainer):
        said = f"{self.how} at iteration {trainer.state.iteration} in {trainer.last_event_name}\n"
        with (self.folder / "stopped.txt").open("a") as file:
            file.write(said)
        if self.how == "stop":
            os.killpg(os.getpid(), signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
