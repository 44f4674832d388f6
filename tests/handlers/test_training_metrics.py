"""Metrics over what is trained on: of the training forward, and exactly once for each sample."""

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import ConfusionMatrix, MeanAbsoluteError, MeanSquaredError
from torch import nn

from ignite_engine import Trainer, Update, create_evaluator
from ignite_engine.handlers import Evaluation
from ignite_engine.handlers.training_metrics import TrainingMetrics
from tests.kit.processes import ranks
from tests.kit.tiny import Numbers, linear, mse, numbers_loader, weights


class Recording:
    """A trainer whose loss function records predictions and targets; the forwards that it has made."""

    def __init__(self, accumulation_steps=None, *, records=True, dropout=True):
        self.forwards, self.records, self.written = 0, records, []
        self.metrics = TrainingMetrics({"mse": MeanSquaredError(), "mae": MeanAbsoluteError()})
        model = linear(dropout=dropout)
        update = Update(model, torch.optim.SGD(model.parameters(), 0.01 if dropout else 0.0), self.loss_fn)
        self.trainer = Trainer(update, accumulation_steps)
        if records:
            self.metrics.attach(self.trainer)
            self.trainer.add_event_handler(Events.EPOCH_COMPLETED, self._note)

    def loss_fn(self, model, batch):
        self.forwards += 1
        predictions = model(batch[0])
        if self.records:
            self.metrics.record((predictions, batch[1]))
        return nn.functional.mse_loss(predictions, batch[1])

    def _note(self, trainer):
        self.written.append(trainer.state.metrics["train/mse"])

    def train(self, **length):
        torch.manual_seed(1)
        self.trainer.run(numbers_loader(16, 2), **length)
        return self


@pytest.mark.row("F4")
def test_values_are_of_the_training_forward_and_change_no_bit():
    recording, losses = Recording(accumulation_steps=2), []
    recording.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda trainer: losses.append(float(trainer.state.output["loss"]))
    )
    recording.train(max_epochs=2)
    plain = Recording(accumulation_steps=2, records=False).train(max_epochs=2)

    means = [sum(losses[:4]) / 4, sum(losses[4:]) / 4]  # dropout: another forward would give others
    assert recording.written == pytest.approx(means) and recording.forwards == plain.forwards == 16
    assert torch.equal(weights(plain.trainer), weights(recording.trainer))
    assert recording.trainer.state.metrics["train/mae"] > 0


def test_what_is_evaluated_is_not_recorded():
    first, second = Recording(), Recording()
    evaluator = create_evaluator(second.trainer.update.model, lambda model, batch: second.loss_fn(model, batch), {})
    Evaluation(evaluator, numbers_loader(6, 2)).attach(second.trainer, Events.ITERATION_COMPLETED(every=2))
    for recording in (first, second):
        recording.train(max_epochs=1)

    assert first.written == second.written and second.forwards > first.forwards


def test_second_run_begins_anew_and_a_matrix_is_a_table():
    matrix = TrainingMetrics({"confusion": ConfusionMatrix(2)}, name="fit")
    model, found = nn.Linear(3, 2), []

    def loss_fn(model, batch):
        logits, classes = model(batch[0]), (batch[1] > 0).long().flatten()
        matrix.record((logits, classes))
        return nn.functional.cross_entropy(logits, classes)

    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn))
    matrix.attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: found.append(trainer.state.metrics["fit/confusion"]))
    broken = trainer.add_event_handler(Events.ITERATION_COMPLETED(once=7), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(8, 2), max_epochs=2)
    broken.remove()
    trainer.run(numbers_loader(8, 2), max_epochs=1)

    assert [sum(map(sum, each)) for each in found] == [8, 8] and all(type(each) is list for each in found)


def test_ranks_count_each_sample_once_also_where_one_has_fewer_or_none():
    data = Numbers(9)

    def work(rank):
        answers = []
        for first in (6, 9):
            own = range(first) if rank == 0 else range(first, 9)
            batches = [tuple(part[None] for part in data[index]) for index in own]
            recording = Recording(accumulation_steps=2, dropout=False)
            recording.trainer.run(batches, max_epochs=1)
            answers += recording.written
        return answers

    with torch.no_grad():
        expected = float(mse(linear(), (data.inputs, data.targets)))
    assert ranks(2, work) == [[pytest.approx(expected)] * 2] * 2


def test_where_nothing_is_recorded_one_line_says_so(caplog):
    recording = Recording()
    recording.trainer.update.loss_fn = mse
    recording.trainer.state.metrics["train/mse"] = 0.0  # what the note would read
    recording.train(max_epochs=1)

    assert "nothing to measure" in caplog.text and "record(" in caplog.text
