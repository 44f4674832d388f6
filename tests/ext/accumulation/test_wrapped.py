"""An optimizer that wraps another one: everything that it does not override is that one's."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from ignite_engine.ext.accumulation import GradientAccumulationLRScheduler, GradientAccumulationOptimizer, initialize
from tests.ext.accumulation.loops import DOUBLE, clear_last, made, micro_batches
from tests.kit.tiny import linear, mse, one


def test_it_is_an_optimizer_and_everything_else_is_the_wrapped_ones():
    model, optimizer, scheduler = made(2)
    bare, calls = optimizer.optimizer, list[str]()
    assert isinstance(optimizer, Optimizer) and isinstance(scheduler, torch_schedulers.LRScheduler)
    assert optimizer.param_groups is bare.param_groups and optimizer.state is bare.state
    assert optimizer.defaults is bare.defaults and "lr: 0.1" in repr(optimizer)
    assert scheduler.base_lrs == [0.1] and scheduler.last_epoch == 0 and scheduler.optimizer is bare
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("saved"))
    extra = nn.Parameter(torch.zeros(1, dtype=DOUBLE))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert [group["lr"] for group in bare.param_groups] == [0.1, 0.5]
    for batch in micro_batches(4):
        clear_last(model, optimizer, GradientAccumulationLRScheduler(scheduler.scheduler, 9), batch)
    optimizer.state_dict()
    assert calls == ["stepped", "stepped", "saved"]
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


def test_torch_schedulers_may_be_made_over_it():
    model = linear(dtype=DOUBLE)
    optimizer = GradientAccumulationOptimizer(SGD(model.parameters(), lr=1.0), model, 2)
    scheduler = torch_schedulers.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, about a step that it has not seen
        for batch in micro_batches(4):
            optimizer.backward(mse(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.accumulation_boundary():
                scheduler.step()

    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25 and optimizer.optimizer_steps == 2


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("done", [0, 2])
def test_a_copy_continues_with_the_same_bits(copied, precision, done):
    batches, model = micro_batches(6), linear(dtype=DOUBLE)
    bare = torch.optim.AdamW(model.parameters(), lr=0.1)
    pair = initialize(model, bare, torch_schedulers.ExponentialLR(bare, 0.5), 2, precision=precision)
    for batch in batches[:done]:
        clear_last(model, *pair, batch)
    other, other_optimizer, other_scheduler = copied((model, *pair))
    assert other_optimizer.model is other and other_optimizer.optimizer is not bare
    for batch in batches[done:]:
        clear_last(model, *pair, batch)
        clear_last(other, other_optimizer, other_scheduler, batch)

    assert torch.equal(one(other), one(model)) and other_optimizer.optimizer_steps == 3
    assert other_scheduler.get_last_lr() == pair[1].get_last_lr() == [0.1 * 0.5**3]
    assert not torch.equal(one(model), one(linear(dtype=DOUBLE)))


def test_no_copy_within_a_group():
    model = linear(dtype=DOUBLE)
    optimizer = GradientAccumulationOptimizer(SGD(model.parameters(), lr=0.1), model, 2)
    optimizer.backward(mse(model, micro_batches(1)[0]))

    with pytest.raises(RuntimeError, match="copied within a group"):
        pickle.dumps(optimizer)
