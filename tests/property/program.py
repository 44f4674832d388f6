"""The program of a case: a script as a user writes it, run whole, or broken off, or started again."""

import os
import signal

import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, seed_everything
from ignite_engine.handlers import EMA, Checkpoint, EarlyStopping, Evaluation, GracefulStop, MetricLogger
from tests.property.data import data_of, evaluation_data
from tests.property.handlers import attach_ignite, attach_schedule, attach_users
from tests.property.models import LossFn, Net, optimizers_of, weight_fn_of

SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGKILL": signal.SIGKILL}
OF_IGNITE = ("average_loss", "halves")
"""Metrics that Ignite computes at an epoch's end."""
DDP_OPTIONS = {
    "bucket views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "find_unused_parameters": {"find_unused_parameters": True},
    "own buffers": {"broadcast_buffers": False},
}


class Planned(Exception):
    """The exception by which a case breaks a run off."""


def notes_of(folder):
    """Where what happened is written down; beside the folder, in which file operations are counted and fail."""
    path = folder.with_name(f"{folder.name} notes")
    path.mkdir(parents=True, exist_ok=True)
    return path


class Run:
    """One process's part of a run in ``folder``, on one of its ranks.

    Args:
        whole: nothing breaks in, and nothing is saved before its end, unless the case says so.
    """

    def __init__(self, case, folder, *, whole=False, rank=0, batch_size=None):
        self.case, self.folder, self.rank, self.whole = case, folder, rank, whole
        self.stop = self.at = None
        folder.mkdir(parents=True, exist_ok=True)
        self.notes = notes_of(folder)
        seed_everything(case.seed)
        model, self.loss_fn = Net(case), LossFn(case)
        self.model = model
        optimizers = optimizers_of(case, model, self.loss_fn)
        wrapped = model
        if case.ranks > 1 and torch.distributed.is_initialized() and not case.rank_invariant and case.ddp != "none":
            wrapped = DistributedDataParallel(model, **DDP_OPTIONS.get(case.ddp, {}))
        update = Update(
            wrapped,
            optimizers if len(optimizers) > 1 else optimizers["main"],
            self.loss_fn,
            precision=case.precision,
            clip_norm=case.clip,
            weight_fn=weight_fn_of(case),
            # overflows at its beginning, and later again
            grad_scaler={"init_scale": 2.0**17, "growth_interval": 3} if case.precision == "fp16" else None,
            non_finite=case.non_finite,
            accumulate="rank_invariant" if case.rank_invariant else None,
        )
        self.trainer = trainer = Trainer(update, case.steps, global_micro_batches=case.global_micro_batches)
        self.data = data_of(case, folder, self._read, rank, batch_size)
        self.stopped = False
        attach_schedule(case, trainer)
        if case.ema != "no":
            EMA(0.8, warmup=case.ema == "yes").attach(trainer)
        self.evaluator = self._evaluation() if case.evaluation != "none" else None
        if case.early_stopping:
            EarlyStopping("val/loss", patience=1 + case.every % 3, min_delta=0.02).attach(trainer)
        begin = attach_users(case, trainer, model, folder.parent)
        attach_ignite(case, trainer, model)
        if case.log != "no":
            every = {"iterations": 1, "every 3": 3}.get(case.log)
            event = Events.EPOCH_COMPLETED if every is None else Events.ITERATION_COMPLETED(every=every)
            MetricLogger(folder, console=False).attach(trainer, event)
        self.checkpoint = self._checkpoints()
        GracefulStop().attach(trainer)
        trainer.add_event_handler(Events.STARTED, self._announce)
        trainer.add_event_handler(TrainingEvents.WINDOW_STARTED, self._announce)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._record)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, self._record_epoch)
        seed_everything(case.seed + 100 + os.getpid())  # a resumed run draws none of these
        path = self.checkpoint.resume()
        self.resumed_from = None if path is None else trainer.state.iteration
        if path is None:
            [start() for start in begin]
            seed_everything(case.seed + 50 + rank)
        elif path.is_dir() and "after an exception" in (path / "manifest.json").read_text():
            self._write("announced", "saved after an exception")

    def train(self, stop=None, at=None):
        """Until the end, or until ``stop`` at iteration ``at``; whether it was broken off."""
        case, trainer = self.case, self.trainer
        self.stop, self.at, self.stopped = stop, at, False
        limits = {"max_epochs": case.epochs}
        if case.length == "max_iters":
            limits = {"max_iters": 4 * case.epochs + 1}
        elif case.length == "epoch_length":
            limits["epoch_length"] = 2 + case.every
        if stop is not None:
            self._attach_stop(stop)
            if stop.how == "limit":
                limits["max_iters"] = min(at, limits.get("max_iters", at))
        if case.wrong_calls and not self.whole:
            self._call_in_vain()
        try:
            trainer.run(self.data, **limits)
        except Planned:
            return True
        finally:
            self._announce(trainer)
        return trainer.state.status == "interrupted" or (stop is not None and stop.how == "limit")

    def _call_in_vain(self):
        """Calls that are refused, before and after they look at the data; they must not change a bit."""
        for wrong in ({"max_epochs": 0}, {"epoch_length": 0}):
            try:
                self.trainer.run(self.data, **wrong)
            except ValueError:
                continue
            raise AssertionError(f"run({wrong}) is not refused")

    def _evaluation(self):
        case, trainer = self.case, self.trainer
        every = Events.ITERATION_COMPLETED(every=case.every + 1)
        event = {
            "epochs": Events.EPOCH_COMPLETED,
            "resumes": Events.EPOCH_COMPLETED,
            "iterations": every,
            "STARTED and epochs": Events.STARTED | Events.EPOCH_COMPLETED,
            "COMPLETED": Events.COMPLETED,
            "windows": TrainingEvents.WINDOW_STARTED,
        }[case.evaluation]

        def predict(model, batch):
            return model(batch[0], batch[1]).float(), batch[2]

        metrics = {"loss": Loss(nn.functional.cross_entropy), "accuracy": Accuracy()}
        evaluator = create_evaluator(self.model, predict, metrics)
        data = evaluation_data(case, self.data)
        Evaluation(evaluator, data, resumes=case.evaluation == "resumes").attach(trainer, event)
        return evaluator

    def _checkpoints(self):
        case = self.case
        plain = self.whole and not case.whole_saves  # a save must not change a bit either
        event = {
            "epochs": Events.EPOCH_COMPLETED,
            "at the end alone": Events.COMPLETED,
            "windows": TrainingEvents.WINDOW_COMPLETED,
        }.get(case.saves, Events.ITERATION_COMPLETED(every=case.every))
        options = {}
        if not plain:
            options = {"background": case.background, "on_exception": case.on_exception, "memory": case.memory}
            if case.best != "no":
                options |= {"best": "val/loss", "mode": case.best}
        if case.exclude:
            name = next(name for name, _ in self.model.layers.named_children() if name.endswith("frozen"))
            options["exclude"] = [f"model:layers.{name}.inner.*"]
        first = Checkpoint(self.folder / "checkpoints", keep_last=case.keep_last, **options)
        first.attach(self.trainer, Events.COMPLETED if plain else event)
        if case.saves == "two handlers" and not plain:
            others = Checkpoint(self.folder / "others", name="others", background=case.background)
            others.attach(self.trainer, Events.EPOCH_COMPLETED)
        return first

    # what is written down, so that a kill loses nothing of it

    def _write(self, name, text):
        file = os.open(self.notes / f"{name}_{self.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{text}\n".encode())
        os.close(file)

    def _announce(self, trainer):
        for reason in trainer.reproducibility():
            self._write("announced", reason)

    def _record(self, trainer):
        state = trainer.state
        optimizers = trainer.update.optimizers.values()
        rates = [float(group["lr"]).hex() for each in optimizers for group in each.param_groups]
        values = {**state.output, **{name: state.metrics[name] for name in ("running_loss",) if name in state.metrics}}
        reported = " ".join(f"{name} {float(value).hex()}" for name, value in sorted(values.items()))
        batch = state.batch
        grouped = trainer.accumulation_steps is not None or trainer.global_micro_batches is not None
        group = list(batch) if grouped else [batch]
        real = group[: len(group) - state.group.padding]
        ids = [each[3].tolist() for each in real]
        self._write("lines", f"{state.iteration} {state.epoch}\t{ids}\t{reported} lr {' '.join(rates)}")

    def _record_epoch(self, trainer):
        state = trainer.state
        values = {name: float(value).hex() for name, value in sorted(state.metrics.items()) if name in OF_IGNITE}
        self._write("lines", f"{state.iteration} {state.epoch} epoch\t\t{values}")

    # how it is broken off

    def _attach_stop(self, stop):
        if stop.how in ("limit", "file operation", "instant") or stop.event == "a sample is read":
            return
        if stop.how == "stop in an evaluation":
            self.evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: self._strike_if_due())
            return
        event = getattr(Events, stop.event, None) or getattr(TrainingEvents, stop.event)
        self.trainer.add_event_handler(event, lambda: self._strike_if_due())

    def _read(self):
        if self.stop is not None and self.stop.event == "a sample is read" and os.getpid() == self._pid:
            self._strike_if_due()

    _pid = property(lambda self: self.__dict__.setdefault("pid", os.getpid()))

    def _strike_if_due(self):
        stop, trainer = self.stop, self.trainer
        if stop is None or self.stopped or trainer.state.iteration < self.at or self.rank != stop.rank:
            return
        self.stopped = True
        self._write("stopped", f"{stop.how} at iteration {trainer.state.iteration}")
        if stop.how == "exception":
            raise Planned
        if stop.how in SIGNALS:
            os.kill(os.getpid(), SIGNALS[stop.how])
        elif stop.how not in ("limit", "file operation", "instant"):
            trainer.request_stop("here")
