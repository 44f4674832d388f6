"""What ``describe()`` says of a run: what it trains, its rates, what a checkpoint holds, and the bus."""

import pytest
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.data import loader
from ignite_engine.ext.windows import Windows
from ignite_engine.handlers import EMA, Checkpoint, MetricLogger
from tests.kit.tiny import numbers_loader, trainer_of


def optimizer_of(trainer):
    return next(iter(trainer.update.optimizers.values()))


def test_model_length_and_content_of_a_checkpoint_are_told_and_nothing_is_written(tmp_path):
    trainer = trainer_of()
    EMA().attach(trainer)
    Checkpoint(tmp_path).attach(trainer)
    text = trainer.describe(numbers_loader(), max_epochs=10)

    assert text.startswith("Trains for 60 iterations, 10 epochs of 6\n") and "Sequential" in text
    assert "trainer: counters, per rank\n" in text and "model: Sequential, one copy\n" in text
    assert "optimizer: SGD, one copy\n" in text
    assert trainer.state.iteration == 0 and [*tmp_path.iterdir()] == []
    assert "Trains for a run whose length is not known before\n" in trainer_of().describe()


def test_windows_are_described_without_being_opened():
    opened = []
    windows = Windows(["a", "b"], opened.append)
    trainer = trainer_of()
    MetricLogger(console=False).attach(trainer, TrainingEvents.WINDOW_COMPLETED)

    assert "MetricLogger" in trainer.describe(windows) and opened == []


@pytest.mark.parametrize("kind", ["windows", "loader", "dealt out"])
def test_describing_a_run_that_is_under_way_changes_nothing(kind):
    def iterations(described):
        seen = []
        trainer = Trainer(
            lambda engine, batch: seen.append(str(batch)), global_micro_batches=2 if kind == "dealt out" else None
        )
        data = loader(list(range(12)), 2, shuffle=True, seed=3)
        if kind == "windows":
            data = Windows(iter([[1], [2], [3]]), loader)
        if described:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.describe(data, max_epochs=9))
        trainer.run(data, max_epochs=1 if kind == "windows" else 3)
        return seen

    assert iterations(described=True) == iterations(described=False)


def test_update_of_the_users_own_is_described():
    trainer = Trainer(lambda engine, batch: 0.0)

    assert "Trains for 4 iterations" in trainer.describe([1, 2], max_epochs=2)
