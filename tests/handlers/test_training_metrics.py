"""Metrics over what is trained on: of the training forward, exactly once for each sample, and resumed."""

from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import ConfusionMatrix, MeanAbsoluteError, MeanSquaredError
from torch import nn

from ignite_engine import Trainer, Update, create_evaluator
from ignite_engine.handlers import Checkpoint, Evaluation, TrainingMetrics
from tests.kit.tiny import Numbers, linear, mse, numbers_loader, on_two_ranks, trainer_of, weights


class Recording:
    """A trainer whose loss function records predictions and targets; the forwards that it has made."""

    def __init__(self, accumulation_steps=None, event=Events.EPOCH_COMPLETED, *, dropout=True):
        self.forwards = 0
        self.metrics = TrainingMetrics({"mse": MeanSquaredError(), "mae": MeanAbsoluteError()})
        model = linear(dropout=dropout)
        update = Update(model, torch.optim.SGD(model.parameters(), 0.01 if dropout else 0.0), self.loss_fn)
        self.trainer = Trainer(update, accumulation_steps)
        self.metrics.attach(self.trainer, event)
        self.written = []
        self.trainer.add_event_handler(event, self._note)

    def loss_fn(self, model, batch):
        self.forwards += 1
        predictions = model(batch[0])
        self.metrics.record((predictions, batch[1]))
        return nn.functional.mse_loss(predictions, batch[1])

    def _note(self, trainer):
        self.written.append((trainer.state.iteration, trainer.state.metrics["train/mse"]))


@pytest.mark.row("F4")
def test_values_are_of_the_training_forward_and_change_no_bit():
    torch.manual_seed(1)
    recording, losses = Recording(accumulation_steps=2), list[float]()
    recording.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda trainer: losses.append(float(trainer.state.output["loss"]))
    )
    recording.trainer.run(numbers_loader(16, 2), max_epochs=2)
    torch.manual_seed(1)
    plain = trainer_of(linear(dropout=True), accumulation_steps=2, lr=0.01)
    plain.update.optimizers["optimizer"].param_groups[0]["momentum"] = 0.0
    plain.run(numbers_loader(16, 2), max_epochs=2)
    means = [sum(losses[:4]) / 4, sum(losses[4:]) / 4]  # dropout: another forward would give others
    assert recording.written == [(4, pytest.approx(means[0])), (8, pytest.approx(means[1]))]
    assert recording.forwards == 16 and torch.equal(weights(plain), weights(recording.trainer))
    assert recording.trainer.state.metrics["train/mae"] > 0


def test_what_is_evaluated_is_not_recorded():
    first, second = Recording(), Recording()
    evaluator = create_evaluator(second.trainer.update.model, lambda model, batch: second.loss_fn(model, batch), {})
    Evaluation(evaluator, numbers_loader(6, 2)).attach(second.trainer, Events.ITERATION_COMPLETED(every=2))
    for recording in (first, second):
        torch.manual_seed(1)
        recording.trainer.run(numbers_loader(16, 2), max_epochs=1)
    assert first.written == second.written and second.forwards > first.forwards


@pytest.mark.row("F4")
@pytest.mark.parametrize("at", [1, 4, 5, 8, 9, 11])
def test_resumed_run_has_the_values_of_the_whole_one(tmp_path, at):
    def run(stop_at, folder):
        torch.manual_seed(1)
        recording = Recording(event=Events.ITERATION_COMPLETED(every=5))
        checkpoint = Checkpoint(folder)
        checkpoint.attach(recording.trainer, Events.COMPLETED)
        checkpoint.resume()
        if stop_at is not None:
            event = Events.ITERATION_COMPLETED(once=stop_at)
            recording.trainer.add_event_handler(event, lambda: recording.trainer.request_stop("here"))
        recording.trainer.run(numbers_loader(16, 2), max_epochs=2)
        return recording

    whole = run(None, tmp_path / "whole")
    parts = run(at, tmp_path / "parts"), run(None, tmp_path / "parts")
    assert [value for part in parts for value in part.written] == whole.written
    assert len(whole.written) == 3 and torch.equal(weights(parts[1].trainer), weights(whole.trainer))


def test_second_run_begins_anew_and_a_matrix_is_a_table():
    matrix = TrainingMetrics({"confusion": ConfusionMatrix(2)}, name="fit")
    model, found = nn.Linear(3, 2), list[Any]()

    def loss_fn(model, batch):
        logits, classes = model(batch[0]), (batch[1] > 0).long().flatten()
        matrix.record((logits, classes))
        return nn.functional.cross_entropy(logits, classes)

    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn))
    matrix.attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: found.append(matrix.values["fit/confusion"].sum()))
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: found.append(type(trainer.state.metrics["fit/confusion"]) is list)
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=7), lambda: trainer.terminate())
    trainer.run(numbers_loader(8, 2), max_epochs=2)
    trainer.state.max_epochs = None
    trainer.run(numbers_loader(8, 2), max_epochs=1)
    assert found == [8, True, 8, True]


def test_ranks_count_each_sample_once_also_where_one_has_fewer_or_none(tmp_path):
    data, counts = Numbers(9), {"uneven": (6, 3), "none": (9, 0)}

    def cases(rank):
        answers = {}
        for name, (first, _) in counts.items():
            own = range(first) if rank == 0 else range(first, 9)
            batches = [tuple(part[None] for part in data[index]) for index in own]
            for kind, given in {"sized": batches, "unsized": _Unsized(batches)}.items():
                recording = Recording(accumulation_steps=2, dropout=False)
                recording.trainer.run(given, max_epochs=1)
                answers[f"{name} {kind}"] = recording.written[0][1]
        return answers

    with torch.no_grad():
        expected = float(mse(linear(), (data.inputs, data.targets)))
    answers = on_two_ranks(cases, tmp_path / "meet")
    assert answers == {name: [pytest.approx(expected)] * 2 for name in answers} and len(answers) == 4


class _Unsized:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)
