"""Saved beside the training: the same bytes as if training had waited, whatever happens meanwhile."""

import os
import threading
import time

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.handlers import Checkpoint
from tests.kit import saved
from tests.kit.resume import leaves, same_bits
from tests.kit.tiny import linear, numbers_loader, trainer_of

EACH = Events.ITERATION_COMPLETED


@pytest.fixture
def slow_writes(monkeypatch):
    """Each file is opened late in a thread that saves beside the training."""
    opens = os.open

    def late(*arguments, **options):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        return opens(*arguments, **options)

    monkeypatch.setattr(os, "open", late)


def changed_by_handlers():
    """Weights, and the optimizer's state, that are changed outside of its step."""
    trainer = trainer_of()

    @trainer.on(Events.ITERATION_STARTED)
    def halve():
        for parameter in trainer.update.model.parameters():
            parameter.data.mul_(0.5)
        for values in trainer.update.optimizers["optimizer"].state.values():
            values["momentum_buffer"].mul_(0.5)

    return trainer


class Counts(nn.Linear):
    """A parameter that is not trained, and that the forward pass changes."""

    def __init__(self):
        super().__init__(4, 1)
        self.passes = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, inputs):
        self.passes.add_(1)
        return super().forward(inputs)


def changed_by_the_forward_pass():
    torch.manual_seed(0)
    return trainer_of(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Counts()))


def changed_by_an_update_of_ones_own():
    model = linear()

    def update(engine, batch):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(engine.state.iteration)
        return 0.0

    trainer = Trainer(update)
    trainer.register("model", model, shared=True)
    return trainer


@pytest.mark.row("D16")
@pytest.mark.usefixtures("slow_writes")
@pytest.mark.parametrize(
    "build",
    [
        changed_by_handlers,
        changed_by_the_forward_pass,
        pytest.param(changed_by_an_update_of_ones_own, marks=pytest.mark.nightly),
    ],
)
def test_every_checkpoint_is_that_of_a_run_that_waited(build, tmp_path):
    """Whoever changes weights and states before the save has ended."""
    for name in ("waited", "beside"):
        trainer, failed = build(), []
        Checkpoint(tmp_path / name, keep_last=9, background=name == "beside").attach(trainer, EACH)
        trainer.add_event_handler(TrainingEvents.CHECKPOINT_FAILED, lambda failed=failed: failed.append(1))
        torch.manual_seed(1)
        trainer.run(numbers_loader(), max_iters=5)
        assert not failed and saved.iterations(tmp_path / name) == [1, 2, 3, 4, 5]
    for iteration in range(1, 6):
        waited, beside = (dict(leaves(saved.parts(tmp_path / name, iteration))) for name in ("waited", "beside"))
        assert waited.keys() == beside.keys()
        assert not [key for key in waited if not same_bits(waited[key], beside[key])], f"at iteration {iteration}"


def test_training_goes_on_and_the_save_is_announced_at_the_first_boundary_after_it(tmp_path, monkeypatch):
    trainer, go_on, announced, rename = trainer_of(), threading.Event(), [], os.rename
    committed = threading.Event()

    def held(source, target, **options):
        if str(target).endswith("iteration_00000002"):
            assert go_on.wait(30)
        rename(source, target, **options)
        if str(target).endswith("iteration_00000002"):
            committed.set()

    def let_go():
        assert saved.iterations(tmp_path) == []
        go_on.set()
        assert committed.wait(30)

    monkeypatch.setattr(os, "rename", held)
    Checkpoint(tmp_path, background=True).attach(trainer, EACH(once=2))
    trainer.add_event_handler(EACH(once=5), let_go)
    trainer.add_event_handler(EACH, lambda: time.sleep(0.02))  # the commit's last operations follow its rename
    trainer.add_event_handler(
        TrainingEvents.CHECKPOINT_SAVED,
        lambda: announced.append((trainer.state.saved_iteration, trainer.state.iteration)),
    )
    trainer.run(numbers_loader(40), max_iters=20)

    assert [what for what, _ in announced] == [2, 20] and 5 <= announced[0][1] < 20
    assert trainer.state.save_seconds > 0


def test_a_stop_waits_for_both_saves_and_the_last_one_is_in_the_foreground(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path, background=True).attach(trainer, EACH(once=3))
    trainer.add_event_handler(EACH(once=4), lambda: trainer.request_stop("enough"))
    trainer.run(numbers_loader(), max_iters=60)

    assert saved.iterations(tmp_path) == [3, 4] and trainer.state.status == "interrupted"
