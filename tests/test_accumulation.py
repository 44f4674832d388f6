"""``Update(accumulate=...)``: a name of a package that is imported when it is used, or an object from outside."""

import re
import sys

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, Update, loader
from ignite_engine.update import Accumulation, BaseUpdate
from tests.kit.refusals import refusals
from tests.kit.resume import Program, assert_resumes
from tests.kit.tiny import Numbers, linear, mse, numbers_loader, one


class Momentum:
    """What is kept from update to update, and is in checkpoints."""

    def __init__(self):
        self.kept = None

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


class Smoothed(Accumulation):
    """Steps with the mean of these gradients and the ones before, without one micro-batch in three."""

    def __init__(self):
        self.momentum, self.started = Momentum(), 0

    def stateful(self):
        return [("smoothed", self.momentum, True)]

    def run_started(self):
        self.started += 1

    def scales(self, engine, group):
        return [0.0 if at == 2 else 1.0 / 2 for at in range(len(super().scales(engine, group)))]

    def __call__(self, engine, micro_batches, scales):
        output = super().__call__(engine, micro_batches, scales)
        weight = self.update.model[0].weight
        before = torch.zeros_like(weight) if self.momentum.kept is None else self.momentum.kept
        weight.grad = self.momentum.kept = (weight.grad + before) / 2
        return output | {"kept": weight.grad.norm()}


def smoothed():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, accumulate=Smoothed())
    return Trainer(update, accumulation_steps=3)


def test_strategy_from_outside_weighs_steps_and_is_resumed_exactly(tmp_path):
    trainer = smoothed()
    trainer.run(numbers_loader(24, 4), max_epochs=2)
    assert trainer.update.accumulation.started == 1 and "kept" in trainer.state.output
    assert trainer.state.optimizer_steps == 4 and trainer.state.micro_batches == 8, "the third weighs nothing"

    made = Program(smoothed, lambda: loader(Numbers(24), 4, shuffle=True, seed=1), {"max_epochs": 2})
    assert_resumes(made, tmp_path, at=(1, 3), how=["stop"])


class StepsItself(Accumulation):
    def clip_and_step(self):
        for optimizer in self.update.optimizers.values():
            optimizer.step()
        return True, torch.tensor(7.0)


def test_strategy_that_steps_itself_has_the_weights_of_the_ordinary_one():
    ends = []
    for accumulate in (None, StepsItself()):
        model = linear()
        update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, accumulate=accumulate)
        state = Trainer(update).run(numbers_loader(12, 4), max_epochs=1)
        ends.append((one(model).tolist(), state.optimizer_steps))
    assert ends[0] == ends[1] and state.output["grad_norm"] == 7.0


def update(accumulate):
    model = linear()
    return Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, accumulate=accumulate)


def used_twice():
    strategy = Accumulation()
    update(strategy), update(strategy)


test_refusals = refusals(
    [
        ("a name", lambda: update("captured"), ValueError, "accumulate 'captured' did you mean 'capture'"),
        ("a class", lambda: update(Accumulation), TypeError, "accumulate Accumulation"),
        ("twice", used_twice, ValueError, "another Update one of its own"),
    ]
)


@pytest.mark.parametrize("name", ["capture", "rank_invariant"])
def test_name_of_a_package_that_was_deleted_is_an_error_of_one_line(name, monkeypatch):
    monkeypatch.setitem(sys.modules, f"ignite_engine.ext.{name}", None)  # its import fails
    text = f"accumulate '{name}' needs ignite_engine.ext.{name}, which is not installed."
    with pytest.raises(ValueError, match=re.escape(text)):
        update(name)


class Counting(BaseUpdate):
    """Everything else has the defaults."""

    def __init__(self):
        self.calls = 0

    def __call__(self, engine, batch):
        self.calls += 1
        return self.calls


def test_update_of_ones_own_and_a_function_need_nothing_but_the_call():
    for given in (Counting(), lambda engine, batch: engine.state.iteration):
        trainer, seen = Trainer(given), []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda t, s=seen: s.append(t.state.output))
        trainer.run(numbers_loader(12, 4), max_epochs=1)
        assert seen == [1, 2, 3] and trainer.reproducibility() == []


def test_class_with_a_state_that_would_not_be_saved_is_refused():
    class Forgetful:
        def stateful(self):
            yield "momentum", Momentum(), True

        def __call__(self, engine, batch): ...

    with pytest.raises(TypeError, match="BaseUpdate"):
        Trainer(Forgetful())
