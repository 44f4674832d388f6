"""What ``describe()`` and the first lines of a run say: its model, length and rates, what is saved, and the bus."""

import logging

import pytest
import torch
from ignite.engine import Events
from torch import nn

import ignite_engine
from ignite_engine import Trainer, TrainingEvents, Update, loader
from ignite_engine.handlers import EMA, Checkpoint, LRSchedule, MetricLogger
from ignite_engine.schedules import warmup_linear
from tests.kit.fitting import fitted
from tests.kit.floors import needs, of
from tests.kit.tiny import mse, numbers_loader, trainer_of


def rows_of(model, *optimized):
    """The rows of the model's table, by their first word."""
    update = Update(model, torch.optim.SGD(optimized or list(model.parameters()), lr=0.1), mse)
    text = Trainer(update).describe()
    found = [line.split() for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in found if cells}


def test_length_and_content_of_a_checkpoint_are_told_and_nothing_is_written(tmp_path):
    trainer = trainer_of()
    EMA().attach(trainer)
    Checkpoint(tmp_path).attach(trainer)
    text = trainer.describe(numbers_loader(), max_epochs=10)

    assert "60 iterations" in text and "10 epochs" in text and "EMA" in text and "RESUME_POINT" in text
    assert "optimizer: SGD" in text and "model: Sequential" in text
    assert trainer.state.iteration == 0 and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("data", "length"), [([1, 2], "4 iterations"), (None, "2 epochs")])
def test_an_update_of_the_users_own_is_described(data, length):
    text = Trainer(lambda engine, batch: 0.0).describe(*[data] if data else [], max_epochs=2)
    assert length in text


@needs("windows")
def test_windows_are_described_without_being_opened():
    opened = []
    trainer = trainer_of()
    MetricLogger(console=False).attach(trainer, TrainingEvents.WINDOW_COMPLETED)
    assert "MetricLogger" in trainer.describe(ignite_engine.Windows(["a", "b"], opened.append)) and opened == []


@pytest.mark.parametrize("kind", [*of("windows", ["windows"]), "loader", "dealt out"])
def test_describing_a_run_that_is_under_way_changes_nothing(kind):
    def iterations(described):
        seen = []
        dealt_out = {"global_micro_batches": 2} if kind == "dealt out" else {}
        trainer = Trainer(lambda engine, batch: seen.append(str(batch)), **dealt_out)
        data = loader(list(range(12)), 2, shuffle=True, seed=3)
        if kind == "windows":
            data = ignite_engine.Windows(iter([[1], [2], [3]]), loader)
        if described:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.describe(data, max_epochs=9))
        trainer.run(data, max_epochs=1 if kind == "windows" else 3)
        return seen

    assert iterations(described=True) == iterations(described=False)


@pytest.mark.row("E4")
def test_the_rates_of_a_run_are_listed_and_plotted():
    trainer = trainer_of(lr=0.5)
    LRSchedule(warmup_linear(next(iter(trainer.update.optimizers.values())), warmup=50, total=100)).attach(trainer)
    lines = trainer.describe(numbers_loader(), max_iters=100).splitlines()
    listed = [line.split() for line in lines if "e-0" in line and "|" not in line]
    rates = {int(cells[0]): float(cells[1]) for cells in listed}
    bars = [line.partition("|")[2] for line in lines if "|" in line and "#" in line]

    assert rates[1] == pytest.approx(0.01) and rates[51] == pytest.approx(0.49, rel=0.03) and rates[100] < 0.02
    assert bars and bars[0].index("#") == pytest.approx(len(bars[-1]) / 2, abs=4)


def test_parameters_are_counted_once_with_what_is_trained_of_each_part():
    body = nn.Linear(4, 8).requires_grad_(False)
    head = nn.Linear(8, 3, dtype=torch.float64)
    model = nn.ModuleDict({"body": body, "act": nn.ReLU(), "again": body, "head": head})
    rows = rows_of(model, *head.parameters())
    assert rows["body"] == ["Linear", "40", "0", "float32", "160", "bytes"]
    assert rows["head"] == ["Linear", "27", "27", "float64", "216", "bytes"]
    assert rows["ModuleDict"] == ["67", "27", "float32,", "float64", "376", "bytes"] and "again" not in rows


def test_a_fresh_run_begins_with_its_model_and_a_resumed_one_does_not(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    console = {"MetricLogger": {"console": True, "every": 4}}
    fitted(tmp_path, **console)
    assert [line for line in caplog.messages if line.split()[:3] == ["0", "Linear", "40"]]
    caplog.clear()
    fitted(tmp_path, max_epochs=4, **console)
    assert not any("Linear" in line for line in caplog.messages)
