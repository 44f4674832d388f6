"""The gated scheduler: when it steps, alone and with the optimizer, and what it saves."""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as torch_schedulers

from ignite_engine.ext.accumulation import (
    GradientAccumulationLRScheduler,
    initialize,
)
from ignite_engine.handlers import warmup_cosine
from tests.ext.accumulation.loops import DOUBLE, clear_last, made, micro_batches
from tests.faults.commands import program
from tests.kit.tiny import linear, mse, one

ROOT = Path(__file__).resolve().parents[3]


def test_scheduler_alone_counts_its_own_calls():
    optimizer = SGD(linear().parameters(), lr=1.0)
    scheduler = GradientAccumulationLRScheduler(torch_schedulers.ExponentialLR(optimizer, 0.5), 3)
    optimizer.step()
    seen = []
    for _ in range(7):
        scheduler.step()
        seen.append(scheduler.get_last_lr()[0])
    assert seen == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_state_of_a_scheduler_alone_says_how_far_its_group_is():
    optimizer = SGD(linear().parameters(), lr=1.0)
    scheduler = GradientAccumulationLRScheduler(torch_schedulers.ExponentialLR(optimizer, 0.5), 3)
    optimizer.step()
    scheduler.step()
    scheduler.step()
    other = GradientAccumulationLRScheduler(torch_schedulers.ExponentialLR(optimizer, 0.5), 3)
    other.load_state_dict(scheduler.state_dict())
    other.step()

    assert other.last_epoch == 1


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # it sees this process only
def test_state_that_was_saved_before_the_scheduler_moved_moves_it():
    batches = micro_batches(4)
    model, optimizer, scheduler = made(2)
    for batch in batches[:2]:
        optimizer.backward(mse(model, batch))
        optimizer.step()
        states = copy.deepcopy([each.state_dict() for each in (model, optimizer.optimizer, scheduler)])
        scheduler.step()
        optimizer.zero_grad()
    other, other_optimizer, other_scheduler = made(2)
    for each, state in zip((other, other_optimizer, other_scheduler), states, strict=True):
        each.load_state_dict(state)
    for batch in batches[2:]:
        clear_last(other, other_optimizer, other_scheduler, batch)
        clear_last(model, optimizer, scheduler, batch)

    assert torch.equal(one(other), one(model)) and other_scheduler.get_last_lr() == scheduler.get_last_lr()


def test_a_schedule_of_ours_sets_the_lr_of_the_first_update():
    bare = SGD((model := linear()).parameters(), lr=0.3)
    optimizer, scheduler = initialize(model, bare, warmup_cosine(bare, warmup=3, total=10), 2)

    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == pytest.approx(0.1)


def schedulers():
    return {
        "lambda": lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda epoch: 1.0 / (epoch + 1)),
        "one_cycle": lambda optimizer: torch_schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
        "sequential": lambda optimizer: torch_schedulers.SequentialLR(
            optimizer,
            [torch_schedulers.LinearLR(optimizer), torch_schedulers.CosineAnnealingLR(optimizer, 9)],
            milestones=[3],
        ),
        "ours": lambda optimizer: warmup_cosine(optimizer, warmup=3, total=10),
    }


@pytest.mark.parametrize("name", schedulers())
@pytest.mark.parametrize("saved_after", [8, 9])  # at the edge of a group, and within one
def test_state_that_was_saved_goes_on_exactly(name, saved_after):
    def pair():
        model = linear(dtype=DOUBLE)
        optimizer = AdamW(model.parameters(), lr=0.1)
        return model, *initialize(model, optimizer, schedulers()[name](optimizer), 2)

    batches, trace, goes_on = micro_batches(16), list[float](), list[float]()
    model, optimizer, scheduler = pair()
    file = io.BytesIO()
    for index, batch in enumerate(batches):
        if index == saved_after:
            torch.save([each.state_dict() for each in (model, optimizer, scheduler)], file)
        clear_last(model, optimizer, scheduler, batch)
        trace.append(optimizer.param_groups[0]["lr"])

    file.seek(0)
    states = torch.load(file, weights_only=True)
    other, other_optimizer, other_scheduler = pair()
    for each, state in zip((other, other_optimizer, other_scheduler), states, strict=True):
        each.load_state_dict(state)
    for batch in batches[saved_after:]:
        clear_last(other, other_optimizer, other_scheduler, batch)
        goes_on.append(other_optimizer.param_groups[0]["lr"])
    assert goes_on == trace[saved_after:] and len(set(goes_on)) >= 3
    assert torch.equal(one(other), one(model)) and other_optimizer.optimizer_steps == 8


IN_ANOTHER_PROCESS = """
import sys, torch
from ignite_engine.ext.accumulation import initialize
model = torch.nn.Linear(3, 1)
bare = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(bare, 2, gamma=0.5)
pair = initialize(model, bare, scheduler, 2, precision="fp16", grad_scaler={"init_scale": float(sys.argv[2])})
if sys.argv[1] == "goes on":
    for each, state in zip((model, *pair), torch.load("state.pt", weights_only=True)):
        each.load_state_dict(state)
optimizer, scheduler = pair
for _ in range(6):
    optimizer.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
torch.save([each.state_dict() for each in (model, *pair)], "state.pt")
print(scheduler.get_last_lr()[0], optimizer.optimizer_steps, optimizer.skipped_steps, optimizer.scaler.get_scale())
"""


@pytest.mark.slow
def test_lr_goes_on_in_a_fresh_process(tmp_path):
    def lines(*arguments):
        process = program(tmp_path, IN_ANOTHER_PROCESS, *arguments)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        return output.split()

    assert lines("starts", "128") == ["0.5", "3", "0", "128.0"]
    assert lines("goes on", "1") == ["0.125", "6", "0", "128.0"]
