"""Resume, judged: a run that was stopped, killed or broken and went on ends with the bits of one that was not."""

import inspect
import os
import signal
from dataclasses import dataclass, field

import pytest
import torch
from ignite.engine import Events

from ignite_engine import TrainingEvents, seed_everything
from ignite_engine.checkpoint.nested import is_made_of_tensors, taken_apart
from ignite_engine.checkpoint.sources import read_source
from ignite_engine.handlers import Checkpoint
from tests.kit.processes import ended
from tests.kit.tiny import linear, numbers_loader, trainer_of

EVERYWHERE = None
"""After each iteration but the last."""
PLACES = (3, 4)
"""Within an epoch, and at its end."""
HOW = ("stop", "raise", "kill", "same process")
ALL = ("losses", "metrics", "states")


@dataclass
class Program:
    """A small training that can be built again and again.

    Attributes:
        build: makes a trainer with all that is attached to it but a Checkpoint. It seeds what it draws from.
        data: makes its data.
        limits: of ``run()``.
        checkpoint: further options of its Checkpoint.
        measured: names of metrics that are times, or else differ from run to run.
        parts: names of parts that its checkpoints must hold, or else "states" would compare none of them.
    """

    build: object
    data: object = lambda: numbers_loader(8, 2, shuffle=True)
    limits: dict = field(default_factory=lambda: {"max_epochs": 2})
    checkpoint: dict = field(default_factory=dict)
    measured: tuple = ()
    parts: tuple = ()


def program(handlers=(), *, model=None, data=None, accumulation_steps=None, **options):
    """A Program of two epochs of four batches.

    Args:
        handlers: called at each build: ``lambda: EMA(0.9)`` is attached, ``lambda: (EMA(0.9), event)`` to that event;
            a function of one parameter gets the trainer and attaches what it likes.
        model: makes the model; by default a small one with dropout.
        options: those that ``Program`` has, the others of ``Update``.
    """
    own = {name: options.pop(name) for name in ("limits", "checkpoint", "measured", "parts") if name in options}

    def build():
        seed_everything(7)
        trainer = trainer_of(model() if model else linear(dropout=True), accumulation_steps, **options)
        for make in handlers:
            if inspect.isfunction(make) and inspect.signature(make).parameters:
                make(trainer)
                continue
            handler, *event = made if isinstance(made := make(), tuple) else (made,)
            handler.attach(trainer, *event)
        return trainer

    return Program(build, **({} if data is None else {"data": data}), **own)


def assert_resumes(program, folder, at=PLACES, how=HOW, compare=ALL):
    """Interrupt a run after each of the iterations ``at``, in each way, go on, and compare with the whole run.

    Args:
        folder: an empty one.
        how: "stop": asked for, which saves, and another process goes on; "raise", "kill": an iteration after a save;
            "same process": asked to stop, and run again.
        compare: "losses" of each iteration, "metrics" at its end, "states": all that the last checkpoint holds.
    """
    whole = _Run(program, folder / "whole").run()
    last = len(whole.losses)
    assert last > 1
    for kind in how:
        for iteration in range(1, last) if at is EVERYWHERE else at:
            name = f"{kind} after iteration {iteration}"
            run = INTERRUPTIONS[kind](program, folder / name.replace(" ", "_"), iteration)
            for part in compare:
                getattr(_Run, f"same_{part}")(run, whole, name)


class _Run:
    """One process's part of a run: a new trainer, which resumes where the folder has something."""

    def __init__(self, program, folder, saved_at=None):
        self.program, self.folder = program, folder
        self.losses, self.trainer, self.data = {}, program.build(), program.data()
        self.checkpoint = Checkpoint(folder, keep_last=2, **program.checkpoint)
        self.checkpoint.attach(
            self.trainer, Events.ITERATION_COMPLETED(once=saved_at) if saved_at else Events.COMPLETED
        )
        self.trainer.add_event_handler(TrainingEvents.RESUME_POINT, self._note)
        self.checkpoint.resume()

    def run(self):
        self.trainer.run(self.data, **self.program.limits)
        return self

    def at(self, iteration, action):
        def act(trainer):
            if trainer.state.iteration == iteration:
                action()

        # not at RESUME_POINT, where a stop that is asked for takes effect an iteration later
        event = Events.ITERATION_COMPLETED if action == self.stop else TrainingEvents.RESUME_POINT
        self.trainer.add_event_handler(event, act)
        return self

    def stop(self):
        self.trainer.request_stop("a test")

    def _note(self, trainer):
        output = trainer.state.output
        loss = output["loss"] if isinstance(output, dict) else output
        if loss is not None:  # it is stopped before its first update
            self.losses[trainer.state.iteration] = float(loss)

    def same_losses(self, whole, name):
        expected = {iteration: loss for iteration, loss in whole.losses.items() if iteration in self.losses}
        assert whole.trainer.state.iteration == self.trainer.state.iteration, name
        assert self.losses == expected and self.losses, name

    def same_metrics(self, whole, name):
        def values(run):
            metrics = sorted(run.trainer.state.metrics.items())  # a resumed run has written them in another order
            return {key: value for key, value in metrics if key not in run.program.measured}

        assert repr(values(self)) == repr(values(whole)), name

    def same_states(self, whole, name):
        parts, saved = whole.saved(), self.saved()
        assert set(self.program.parts) <= parts.keys() & saved.keys(), (name, list(parts), list(saved))
        expected, found = dict(leaves(parts)), dict(leaves(saved))
        assert found.keys() == expected.keys(), name
        differ = [key for key, value in expected.items() if not same_bits(value, found[key])]
        assert not differ, f"{name}: {[(key, expected[key], found[key]) for key in differ[:3]]}"

    def saved(self):
        return saved_in(self.folder)


def saved_in(folder, rank=0):
    """All that the newest checkpoint in a folder holds for a rank, by part, but how often was saved."""
    newest = max(path for path in folder.iterdir() if path.name.startswith("iteration_"))
    parts = read_source(newest, rank).parts
    parts["trainer"].pop("checkpoints")
    return parts


def leaves(value, path=()):
    """The tensors and plain values within nested mappings and sequences, each with its path."""
    if isinstance(value, dict):
        value = {**value}
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    else:
        yield path, value
        return
    for key, each in value.items():
        yield from leaves(each, (*path, key))


def same_bits(one, other):
    """Whether two leaves are the same: tensors in dtype, shape and bits, numbers in all digits."""
    if is_made_of_tensors(one) and type(one) is type(other):
        parts, context = taken_apart(one)
        others, other_context = taken_apart(other)
        return repr(context) == repr(other_context) and all(same_bits(parts[name], others[name]) for name in parts)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.layout != other.layout or one.dtype != other.dtype:
            return False
        if one.layout != torch.strided:
            one, other = one.to_dense(), other.to_dense()
        return torch.equal(one, other) or repr(one) == repr(other)
    return repr(one) == repr(other)


def _stopped(program, folder, iteration):
    run = _Run(program, folder)
    run.at(iteration, run.stop).run()
    return _Run(program, folder).run()


def _in_the_same_process(program, folder, iteration):
    run = _Run(program, folder)
    return run.at(iteration, run.stop).run().run()


def _raised(program, folder, iteration):
    with pytest.raises(ZeroDivisionError):
        _Run(program, folder, saved_at=max(1, iteration - 1)).at(iteration, lambda: 1 / 0).run()
    return _Run(program, folder).run()


def _killed(program, folder, iteration):
    def work():
        run = _Run(program, folder, saved_at=max(1, iteration - 1))
        run.at(iteration, lambda: os.kill(os.getpid(), signal.SIGKILL)).run()

    assert ended(work)[0] == -signal.SIGKILL
    return _Run(program, folder).run()


INTERRUPTIONS = {"stop": _stopped, "raise": _raised, "kill": _killed, "same process": _in_the_same_process}
