"""The program of a drawn case: a script as a user writes it, run whole, or stopped, or started again."""

import contextlib
import faulthandler
import hashlib
import json
import logging
import os
import random
import signal
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Loss, Precision
from torch import Tensor, nn

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator
from ignite_engine.engine.loop import Loop
from ignite_engine.handlers import EMA, Checkpoint, EarlyStopping, Evaluation, GracefulStop, MetricLogger
from ignite_engine.states.generators import ModelGenerators
from ignite_engine.step.accumulate import forward_backward
from tests.search import resume_data
from tests.search.common import device_kind
from tests.search.resume_data import data_of, evaluation_data
from tests.search.resume_handlers import attach_ignite, attach_schedule, attach_users
from tests.search.resume_model import LossFn, Net, optimizers_of
from tests.search.resume_plan import SAMPLE, features_of

REFUSED, RAISED, PLANNED = 3, 4, 5
STUCK_S = 10.0
"""After so long a process writes down where it is."""
IGNITES = ("average_loss", "halves")
"""Metrics that Ignite computes at an epoch's end."""


class PlannedError(Exception):
    """The exception that a case raises to be stopped."""


def run(
    plan,
    folder,
    role,
    stop,
    program=None,
    notes=None,
):
    """Run the program in ``folder``, resuming what is there.

    Args:
        role: ``whole`` (never stopped), ``stopped`` or ``resumed``.
        stop: how it is stopped, and ``at`` which iteration.
        program: its class, if it is not Program.
        notes: where this process writes what it did; None: in ``folder``.

    Returns:
        0 at its end or after an orderly stop; ``REFUSED`` if it raised before an iteration, ``RAISED`` after one, both
        with the error in ``error.txt``; ``PLANNED`` for the exception that was planned.
    """
    place = Path(folder)
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(STUCK_S)
    begins = not any(place.glob("checkpoints*/iteration_*"))
    # the random numbers of a process that resumes are not those of the run
    other = not begins and plan["resumed process"] == "other random numbers"
    seed = plan["seed"] + 1 + os.getpid() if other else plan["seed"]
    random.seed(seed), np.random.seed(seed % 2**32), torch.manual_seed(seed)
    notes = notes or place
    with contextlib.closing(Journal(notes, role)) as journal:
        try:
            made = (program or Program)(plan, place, journal, stop)
            made.train()
        except PlannedError:
            return PLANNED
        except SystemExit:
            return 0
        except BaseException as error:
            told = "".join(traceback.format_exception_only(error)).strip().splitlines()
            where = traceback.extract_tb(error.__traceback__)[-1]
            (notes / "error.txt").write_text(f"{told[0]} [{Path(where.filename).name}:{where.lineno} {where.name}]")
            traceback.print_exc()
            return RAISED if journal.trained else REFUSED
        (notes / f"{role}_end.json").write_text(json.dumps(made.end()))
        return 0


class Journal:
    """What a process writes down while it runs, so that a kill loses nothing of it."""

    def __init__(self, folder, role):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._lines = os.open(folder / "lines.txt", flags)
        self._notes = os.open(folder / "notes.txt", flags)
        self._noted = set()
        self.role, self.trained = role, 0

    def line(self, text):
        os.write(self._lines, f"{text}\n".encode())

    def note(self, what):
        if what not in self._noted:
            self._noted.add(what)
            os.write(self._notes, f"{self.role}\t{what}\n".encode())

    def close(self):
        os.close(self._lines)
        os.close(self._notes)


class Program:
    """Everything that a case draws, put together."""

    def __init__(self, plan, folder, journal, stop):
        self.plan, self.folder, self.journal, self.stop = plan, folder, journal, stop
        self.states = {}
        self.model, self.loss_fn = Net(plan).to(device_kind()), LossFn(plan)
        optimizers = self.made = optimizers_of(plan, self.model, self.loss_fn)
        # overflows at its beginning, and later again
        scaler = {"init_scale": 2.0**17, "growth_interval": 3} if plan["precision"] == "fp16" else None
        update = Update(
            self.wrapped(self.model),
            optimizers,
            self.loss_fn,
            precision=plan["precision"],
            clip_norm=0.5 if plan["clip"] == "yes" else None,
            weight_fn=(lambda batch: float(batch[2].sum()) + 1.0) if plan["weight_fn"] == "yes" else None,
            grad_scaler=scaler,
        )
        self.optimizers = update.optimizers
        steps = plan["accumulation"]
        self.trainer = Trainer(self.called(update), accumulation_steps=None if steps == "None" else int(steps))
        self.data = data_of(plan)
        self._attach()

    def wrapped(self, model):
        return model

    def called(self, update):
        """What the Trainer is given."""
        return update

    def train(self):
        plan, numbers, trainer = self.plan, self.plan["numbers"], self.trainer
        path = self.checkpoints[0].resume() if self.checkpoints else None
        if path is not None:
            self.journal.note(f"resumed from {trainer.state.iteration}")
            # the one reason that a run cannot know at its start
            if "after an exception" in (path / "manifest.json").read_text():
                self.journal.note("announced in the checkpoint")
        length = {"max_epochs": numbers["epochs"]}
        if plan["length"] == "max_iters":
            length = {"max_iters": numbers["max_iters"]}
        elif plan["length"] == "epoch_length":
            length["epoch_length"] = numbers["epoch_length"]
        if plan["calls"] != "good ones" and self.journal.role != "whole":
            self._call_in_vain()
        trainer.run(self.data, **length)

    def _call_in_vain(self):
        """Calls that are refused, before and after they look at the data; they must not change a bit."""
        for wrong in ({"max_epochs": 0}, {"epoch_length": 0}):
            try:
                self.trainer.run(self.data, **wrong)
            except ValueError:
                self.journal.note("calls: refused ones before")
            else:
                raise AssertionError(f"run({wrong}) is not refused")

    def _attach(self):
        plan, trainer, note = self.plan, self.trainer, self.journal.note
        numbers = plan["numbers"]
        attach_schedule(plan, trainer)
        if plan["ema"] != "no":
            ema = EMA(0.8, warmup=plan["ema"] == "yes")
            ema.attach(trainer)
            self.states["ema"] = ema.state_dict
        evaluator = self._evaluation() if plan["evaluation"] != "none" else None
        if plan["early stopping"] == "yes":
            stopping = EarlyStopping("val/loss", patience=numbers["patience"], min_delta=0.02)
            stopping.attach(trainer)
            self.states["early stopping"] = stopping.state_dict
        attach_users(plan, trainer, self.model, note, self.states)
        attach_ignite(plan, trainer, self.model, evaluator, note, self.states)
        self._planted()
        if plan["log"] != "no":
            every = {"iterations": 1, "every 3": 3}.get(plan["log"])
            event = Events.EPOCH_COMPLETED if every is None else Events.ITERATION_COMPLETED(every=every)
            MetricLogger(self.folder, console=False).attach(trainer, event)
        self.checkpoints = self._checkpoints()
        GracefulStop().attach(trainer)
        trainer.add_event_handler(Events.STARTED, self._started)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._record)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, self._record_epoch)
        if self.stop is not None:
            self._attach_stop(self.stop)

    def _evaluation(self):
        plan, trainer = self.plan, self.trainer
        every = Events.ITERATION_COMPLETED(every=plan["numbers"]["evaluate every"])
        event = {
            "epochs": Events.EPOCH_COMPLETED,
            "iterations": every,
            "STARTED and epochs": Events.STARTED | Events.EPOCH_COMPLETED,
            "COMPLETED": Events.COMPLETED,
            "iterations and epochs": every | Events.EPOCH_COMPLETED,
        }[plan["evaluation"]]
        metrics = {"loss": Loss(nn.functional.cross_entropy), "accuracy": Accuracy()}
        if plan["vector metric"] == "yes":
            metrics["precision"] = Precision()

        def predict(model, batch):
            return model(batch[0], batch[1]).float(), batch[2]

        evaluator = create_evaluator(self.model, predict, metrics)
        Evaluation(evaluator, evaluation_data(plan, self.data)).attach(trainer, event)
        return evaluator

    def _checkpoints(self):
        plan, numbers = self.plan, self.plan["numbers"]
        if self.journal.role == "whole":  # a save must not change a bit either
            return []
        event = {
            "iterations": Events.ITERATION_COMPLETED(every=numbers["save every"]),
            "epochs": Events.EPOCH_COMPLETED,
            "at the end alone": Events.COMPLETED,
            "two handlers": Events.ITERATION_COMPLETED(every=numbers["save every"]),
        }[plan["saves"]]
        found = [
            Checkpoint(
                self.folder / "checkpoints",
                keep_last=int(plan["keep_last"]),
                best=None if plan["best"] == "no" else "val/loss",
                mode="min" if plan["best"] == "no" else plan["best"],
                exclude=self._excluded(),
                background=plan["background"] == "yes",
                on_exception=plan["on_exception"] == "yes",
            )
        ]
        found[0].attach(self.trainer, event)
        if plan["saves"] == "two handlers":
            found.append(Checkpoint(self.folder / "others", name="others", background=plan["background"] == "yes"))
            found[1].attach(self.trainer, Events.EPOCH_COMPLETED)
        return found

    def _excluded(self):
        if self.plan["exclude"] == "nothing":
            return []
        name = next(name for name in self.model.layers if name.endswith("frozen"))
        return [f"model:layers.{name}.0.*"]

    def _planted(self):
        """A fault that the search has to find: a handler whose state matters and is not saved."""
        kind, stem = self.plan.get("planted", ""), self.model.stem
        if kind == "handler counter":
            calls = [0]

            def shrink(engine):
                calls[0] += 1
                stem.weight.data.mul_(1.0 - 0.001 * calls[0])

            self.trainer.add_event_handler(Events.ITERATION_COMPLETED, shrink)
        elif kind == "handler generator":
            generator = torch.Generator().manual_seed(5)

            def jitter(engine):
                stem.weight.data.add_(0.001 * torch.randn(stem.weight.shape, generator=generator))

            self.trainer.add_event_handler(Events.ITERATION_COMPLETED, jitter)
        elif kind == "random numbers stay":
            Loop._restore_rng = lambda loop: None
        elif kind == "reported values stay where they are":
            forward_backward.scalar = lambda value: value.detach().float()
        elif kind == "each call draws":
            run = self.trainer.run
            self.trainer.run = lambda *args, **given: (torch.rand(1), run(*args, **given))[1]
        elif kind == "generators stay":
            ModelGenerators.load_state_dict = lambda generators, state: None

    # -- what is written down ------------------------------------------------------------------------------------

    def _started(self, trainer):
        report = trainer.reproducibility
        if reasons := report():
            self.journal.note(f"announced {'; '.join(reasons)}")

    def _record(self, trainer):
        state, journal = trainer.state, self.journal
        journal.trained += 1
        if journal.trained == 1:
            for feature in features_of(self.plan):
                if not feature.startswith(
                    (
                        "handlers",
                        "ignite",
                        "evaluation",
                        "early",
                        "vector",
                        "saves",
                        "background",
                        "calls: r",
                        "damage: newest",
                    )
                ):
                    journal.note(feature)
        output = state.output
        rates = [float(group["lr"]).hex() for each in self.optimizers.values() for group in each.param_groups]
        own = {
            name: value for name, value in state.metrics.items() if name == "running_loss"
        }  # Ignite's, each iteration
        values = " ".join(f"{name} {float(value).hex()}" for name, value in sorted({**output, **own}.items()))
        journal.line(f"iteration {state.iteration} epoch {state.epoch}\t{values} lr {' '.join(rates)}")
        steps = trainer.accumulation_steps
        if steps is not None and isinstance(state.batch, list) and len(state.batch) < steps:
            journal.note("happened: short last group")
        if state.skipped_steps:
            journal.note("happened: overflow")
        self._note_evaluations()
        if self.plan["schedule"] == "ReduceLROnPlateau" and float.fromhex(rates[0]) < 0.9 * self.plan["numbers"]["lr"]:
            journal.note("happened: LR lowered by the plateau")
        if journal.role != "whole" and state.checkpoints:
            for name in ("saves", "background"):
                journal.note(f"{name}: {self.plan[name]}")
            if self.plan["background"] == "yes":
                journal.note("happened: saved in the background")

    def _note_evaluations(self):
        if self.plan["evaluation"] == "none":
            self.journal.note("evaluation: none")
        elif self.trainer.state.evaluations:
            self.journal.note("happened: evaluated")
            for name in ("evaluation", "evaluation data", "early stopping", "vector metric"):
                self.journal.note(f"{name}: {self.plan[name]}")

    def _record_epoch(self, trainer):
        values = " ".join(
            f"{name} {float(value).hex()}" for name, value in sorted(trainer.state.metrics.items()) if name in IGNITES
        )
        self.journal.line(f"epoch {trainer.state.epoch} at {trainer.state.iteration}\t{values}")

    # -- how it is stopped ---------------------------------------------------------------------------------------

    def _attach_stop(self, stop):
        resume_data.when_read = resume_data.nothing
        if not stop["event"]:
            return
        if stop["event"] == SAMPLE:
            trains = os.getpid()
            resume_data.when_read = lambda: self._stop_if_due(self.trainer, stop) if os.getpid() == trains else None
            return
        event = getattr(Events, stop["event"], None) or getattr(TrainingEvents, stop["event"])
        self.trainer.add_event_handler(event, self._stop_if_due, stop)

    def _stop_if_due(self, trainer, stop):
        if trainer.state.iteration < stop["at"] or stop.get("done"):
            return
        stop["done"] = True
        self.journal.note(f"stop: {stop['how']}")
        self.journal.note(f"stop at: {stop['event']}")
        self.journal.note(f"stopped at {trainer.state.iteration}")
        if stop["how"] == "request_stop":
            trainer.request_stop("drawn")
        elif stop["how"] == "exception":
            raise PlannedError
        else:
            os.kill(os.getpid(), signal.SIGKILL if stop["how"] == "SIGKILL" else signal.SIGTERM)

    def end(self):
        """What must be equal at the end, in the order in which a difference is told."""
        state = self.trainer.state
        self._note_evaluations()
        if (state.reason or "").startswith("early stopping"):
            self.journal.note("happened: early stop")
        optimizers = {name: _of_optimizer(each) for name, each in self.optimizers.items()}
        scaler = self.trainer.update.scaler
        outside = {str(index): each for index, each in enumerate(self.loss_fn.parameters())}
        python, numpy = random.getstate(), np.random.get_state()
        parts = {
            "counters": [state.iteration, state.epoch, state.optimizer_steps, state.skipped_steps],
            "model": self.model.state_dict(),
            "outside": outside,
            "optimizers": optimizers,
            "scaler": scaler.state_dict() if scaler is not None else {},
            **{name: take() for name, take in self.states.items()},
            "status": [state.status, state.reason],
            "saved": {"evaluations": self._saved_evaluations()},
            "random numbers": {"python": repr(python), "numpy": repr(numpy), "torch": torch.get_rng_state()},
        }
        found = {}
        for name, part in parts.items():
            _flatten(part, name, found)
        return found

    def _saved_evaluations(self):
        """Of the newest checkpoint, which the end of the run has saved; those at COMPLETED come later."""
        if self.plan["evaluation"] == "COMPLETED":
            return 0
        if not self.checkpoints:
            return self.trainer.state.evaluations
        store = self.checkpoints[0].store
        newest = store.latest().checkpoint
        assert newest is not None
        saved = store.load(newest.path).local["trainer"]["evaluations"]
        return saved


def _of_optimizer(optimizer):
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return {"state": [optimizer.state.get(each, {}) for each in parameters], "groups": groups}


def _flatten(value, name, found):
    if isinstance(value, dict):
        for key, each in value.items():
            _flatten(each, f"{name}.{key}", found)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _flatten(each, f"{name}.{index}", found)
    elif isinstance(value, Tensor):
        value = value.detach().to_dense() if value.is_sparse else value.detach()  # the momentum of a sparse gradient
        raw = value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        found[name] = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()[:12]}"
    else:
        text = value.hex() if isinstance(value, float) else repr(value)
        found[name] = text if len(text) < 60 else hashlib.sha256(text.encode()).hexdigest()[:12]
