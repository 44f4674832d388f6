"""Runs of one process that end while data is read, or a window is opened: the resumed one has the bits of the whole."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_engine import Interrupted, Trainer, TrainingEvents, Update, Windows, create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation, GracefulStop

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata
Attach = Callable[[Trainer], None]


def noted(batch, seen):
    seen += batch[:, 0].floor().tolist()
    return batch


def trained(folder, data, attach=lambda trainer: None, steps=None):
    """What is trained on, and at the end the weights."""
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1)), list[float]()
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, batch: model(noted(batch, seen)).mean()
    )
    trainer = Trainer(update, steps)
    checkpoint = Checkpoint(folder, strict=True)
    checkpoint.attach(trainer)
    GracefulStop().attach(trainer)
    attach(trainer)
    checkpoint.resume()
    try:
        trainer.run(data, max_epochs=2)
    except Interrupted:
        return seen
    return [*seen, *weights(model)] if trainer.state.reason == "max_epochs" else seen


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def number(at):
    """Which sample it is, and a random number."""
    return torch.tensor([float(at), torch.rand(()).item()])


class Stream:
    """Has a state, which changes before a sample is there."""

    def __init__(self, kill_at):
        self.at, self.kill_at = 0, kill_at

    def __iter__(self):
        while self.at < 9:
            self.at += 1
            sample = number(self.at)
            kill(self.kill_at == self.at)
            yield sample[None]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Samples(Dataset[Any]):
    def __init__(self, kill_at):
        self.kill_at = kill_at

    def __len__(self):
        return 9

    def __getitem__(self, index):
        sample = number(index + 1)
        kill(self.kill_at == index + 1)
        return sample


killed = []


def kill(now):
    """Once."""
    if now and not killed:
        killed.append(True)
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def not_killed():
    killed.clear()


DATA = {
    "own": Stream,
    "torchdata": lambda kill_at: StatefulDataLoader(Samples(kill_at), batch_size=1),
}


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("name", DATA)
def test_signal_while_data_with_a_state_is_read_loses_no_sample(name, steps, tmp_path):
    whole = trained(tmp_path / "whole", DATA[name](None), steps=steps)
    for at in (1, 4, 9):
        killed.clear()
        first = trained(tmp_path / str(at), DATA[name](at), steps=steps)
        assert killed and first + trained(tmp_path / str(at), DATA[name](None), steps=steps) == whole, at


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("name", DATA)
def test_run_that_ends_with_a_group_in_hand_has_it_again(name, steps, tmp_path):
    whole = trained(tmp_path / "whole", DATA[name](None), steps=steps)
    last = 4 if steps else 8  # before the last one of an epoch
    for at in (1, 3, last, last + 1):

        def terminates(trainer, at=at):
            trainer.add_event_handler(Events.GET_BATCH_COMPLETED(once=at), trainer.terminate)

        first = trained(tmp_path / str(at), DATA[name](None), terminates, steps)
        assert first + trained(tmp_path / str(at), DATA[name](None), steps=steps) == whole, at


@pytest.mark.parametrize("at", [1, 2])
def test_window_that_was_being_opened_is_opened_again_with_the_same_random_numbers(at, tmp_path):
    def open_window(window, kill_at=None):
        batches = []
        for place in range(3):
            batches.append(number(10 * window + place)[None])
            kill(window == kill_at and place == 1)
        return batches

    whole = trained(tmp_path / "whole", Windows([1, 2, 3], open_window))
    first = trained(tmp_path / "cut", Windows([1, 2, 3], lambda window: open_window(window, at)))
    assert killed and first + trained(tmp_path / "cut", Windows([1, 2, 3], open_window)) == whole


def test_evaluation_that_is_stopped_as_a_window_ends_is_repeated_over_that_window(tmp_path):
    def run(name, stops=False):
        evaluated = []

        def attach(trainer):
            def predict(model, batch):
                if stops and trainer.state.windows == 2:
                    trainer.request_stop("test")
                return batch[:, 0].mean()

            evaluation = Evaluation(create_evaluator(nn.Linear(1, 1), predict, {"mean": Average()}), windows.again)
            evaluation.attach(trainer, TrainingEvents.WINDOW_COMPLETED)
            trainer.add_event_handler(
                TrainingEvents.EVALUATION_COMPLETED,
                lambda: evaluated.append((trainer.state.windows, trainer.state.metrics["val/mean"])),
            )
            trainer.add_event_handler(
                TrainingEvents.WINDOW_COMPLETED, lambda: evaluated.append(("completed", trainer.state.windows))
            )

        windows = Windows([1, 2, 3], lambda window: loader(torch.arange(8.0).view(4, 2) + 100 * window, batch_size=2))
        return evaluated, trained(tmp_path / name, windows, attach)

    evaluated, whole = run("whole")
    before, first = run("cut", stops=True)
    after, rest = run("cut")
    assert first + rest == whole
    # the handler after it is called where the stop comes, and not again
    assert before + after == [*evaluated[:2], evaluated[3], evaluated[2], *evaluated[4:]]


def test_window_that_is_evaluated_again_has_its_order_whatever_else_was_opened(tmp_path):
    def run(name, until=None):
        found = []

        def attach(trainer):
            def evaluation(data, **options):
                evaluator = create_evaluator(nn.Linear(1, 1), lambda model, batch: batch[:, 0].mean(), {"a": Average()})
                return Evaluation(evaluator, data, **options)

            evaluation(windows.whole, name="all").attach(trainer, Events.ITERATION_COMPLETED(once=2))
            evaluation(windows.again, name="now", limit=1).attach(trainer, Events.ITERATION_COMPLETED)
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: found.append(trainer.state.metrics["now/a"]))
            if until is not None:
                event = Events.ITERATION_COMPLETED(once=until)
                trainer.add_event_handler(event, lambda: trainer.request_stop("test"))

        windows = Windows([1, 2, 3], shuffled_window)
        trained(tmp_path / name, windows, attach)
        return found

    whole = run("whole")
    assert run("cut", until=3) + run("cut") == whole and len(set(whole)) > 2


def shuffled_window(window):
    data = torch.arange(24.0).view(12, 2) + 100 * window
    return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(window))
