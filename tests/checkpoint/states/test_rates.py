"""A resume changes the base of the engine's schedules, or the rate of an optimizer without one; torch's keep theirs."""

import pytest
from ignite.engine import Events
from torch import nn
from torch.optim import SGD

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint, LRSchedule
from ignite_engine.schedules import warmup_linear
from tests.kit.tiny import Numbers, linear, mse


def rates_of(folder, stop, lr=None, make=None, *, attach_late=False):
    """The rates of each update until ``stop``, of a run that resumes with ``lr``."""
    model, used = linear(), []
    first, *others = (module for module in model if isinstance(module, nn.Linear))
    groups = [{"params": first.parameters(), "name": "first"}, {"params": others[0].parameters(), "lr": 0.2}]
    optimizer = SGD(groups, lr=0.1)
    trainer, checkpoint = Trainer(Update(model, optimizer, mse)), Checkpoint(folder)
    schedule = None if make is None else LRSchedule(make(optimizer))
    if schedule is not None and not attach_late:
        schedule.attach(trainer)
    checkpoint.attach(trainer)
    checkpoint.resume(lr=lr)
    if schedule is not None and attach_late:
        schedule.attach(trainer)
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: used.append([group["lr"] for group in optimizer.param_groups])
    )
    trainer.run(loader(Numbers(64), 2), max_iters=stop)
    return used


def falling(optimizer):
    return warmup_linear(optimizer, total=10)


@pytest.mark.parametrize("attach_late", [False, True])
def test_a_schedule_goes_on_from_where_it_is_with_the_new_base(tmp_path, attach_late):
    assert rates_of(tmp_path, 5, 0.7, falling)[0] == [0.1, 0.2]  # a fresh run has its own
    assert rates_of(tmp_path, 7, 1.0, falling, attach_late=attach_late) == [
        pytest.approx([0.5] * 2),
        pytest.approx([0.4] * 2),
    ]
    assert rates_of(tmp_path, 8, None, falling, attach_late=attach_late) == [pytest.approx([0.3] * 2)]  # it stays


@pytest.mark.parametrize(
    ("lr", "rates"), [(0.5, [0.5, 0.5]), ({"first": 0.5}, [0.5, 0.2]), ({"optimizer": 0.5, "1": 0.3}, [0.5, 0.3])]
)
def test_an_optimizer_without_a_schedule_has_the_rate(tmp_path, lr, rates):
    rates_of(tmp_path, 2)
    assert rates_of(tmp_path, 4, lr) == [rates, rates] and rates_of(tmp_path, 5) == [rates]
