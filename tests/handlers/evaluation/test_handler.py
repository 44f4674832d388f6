"""An evaluation leaves no trace but its numbers."""

from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average, Loss
from torch import nn

from ignite_engine import TrainingEvents, create_evaluator
from ignite_engine.checkpointing.digests import digests
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.kit.tiny import Numbers, linear, numbers_loader, trainer_of, weights


def predict(model, batch):
    inputs, targets = batch
    return model(inputs), targets


def evaluator_of(model, **options):
    return create_evaluator(model, predict, {"loss": Loss(nn.functional.mse_loss)}, **options)


def model_of(trainer):
    model = trainer.update.model
    return model


class Batches:
    """Passes without a length, of the given numbers of batches; each batch is its number in the pass."""

    def __init__(self, *counts):
        self.counts, self.passes = counts, 0

    def __iter__(self):
        self.passes += 1
        return iter([torch.tensor([float(index)]) for index in range(self.counts[self.passes - 1])])


def averaging():
    return create_evaluator(nn.Linear(1, 1), lambda model, batch: batch, {"mean": Average()})


def test_one_that_is_attached_again_starts_once_and_acts_at_both_events():
    trainer = trainer_of()
    evaluation = Evaluation(evaluator_of(model_of(trainer)), numbers_loader(4))
    evaluation.attach(trainer, Events.EPOCH_COMPLETED)
    evaluation.attach(trainer, Events.ITERATION_COMPLETED(once=1))

    assert trainer.describe().count("Evaluation._start") == 1
    assert trainer.run(numbers_loader(), max_epochs=2).evaluations == 3


def test_metrics_are_those_of_the_whole_set():
    trainer, data = trainer_of(), Numbers(7)
    Evaluation(evaluator_of(model_of(trainer)), numbers_loader(7, 2)).attach(trainer)
    state = trainer.run(numbers_loader())
    with torch.no_grad():
        expected = nn.functional.mse_loss(model_of(trainer)(data.inputs), data.targets)

    assert state.metrics["val/loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert state.evaluations == 1


@pytest.mark.row("A3")
def test_modes_come_back_module_by_module():
    trainer = trainer_of(linear(dropout=True))
    model = model_of(trainer)
    frozen, modes = model[1], list[Any]()

    def freeze():
        frozen.eval()

    def look(model, batch):
        modes.append([module.training for module in model.modules()])
        return predict(model, batch)

    trainer.add_event_handler(Events.ITERATION_STARTED(once=1), freeze)
    Evaluation(create_evaluator(model, look), numbers_loader(4)).attach(trainer, Events.ITERATION_COMPLETED(once=2))
    trainer.run(numbers_loader())

    assert modes == [[False] * 5] * 2
    assert [module.training for module in model.modules()] == [True, True, False, True, True]


@pytest.mark.row("A3")
def test_training_does_not_notice_an_evaluation():
    def run(evaluate):
        torch.manual_seed(4)
        trainer = trainer_of(linear(dropout=True))

        def draw(model, batch):
            torch.rand(3)
            return predict(model, batch)

        if evaluate:
            Evaluation(create_evaluator(model_of(trainer), draw), numbers_loader(5)).attach(
                trainer, Events.STARTED | Events.ITERATION_COMPLETED(every=2)
            )
        torch.manual_seed(8)
        state = trainer.run(numbers_loader(shuffle=True), max_epochs=2)
        assert state.evaluations == (7 if evaluate else 0)
        return weights(trainer)

    assert torch.equal(run(True), run(False))


def test_evaluation_changes_no_weight_and_keeps_no_gradient():
    trainer, seen = trainer_of(), list[bool]()

    def look(model, batch):
        output, targets = predict(model, batch)
        seen.append(output.requires_grad)
        return output, targets

    Evaluation(create_evaluator(model_of(trainer), look), numbers_loader(4)).attach(trainer, Events.STARTED)
    before = []
    trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, lambda: before.append(weights(trainer)))
    trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, lambda: before.append(weights(trainer)))
    trainer.run(numbers_loader(4))

    assert seen == [False, False] and torch.equal(*before)


@pytest.mark.row("C1")
def test_limit_takes_the_first_batches():
    trainer, evaluator = trainer_of(), averaging()
    data = [torch.tensor([float(index)]) for index in range(10)]
    Evaluation(evaluator, data, limit=3).attach(trainer)
    state = trainer.run(numbers_loader(4))

    assert state.metrics["val/mean"] == 1.0 and evaluator.state.iteration == 3
    with pytest.raises(ValueError, match="limit must be at least 1 batch, or None for all, got 0"):
        Evaluation(evaluator, data, limit=0)


@pytest.mark.row("C1")
def test_several_sets_have_each_their_own_interval():
    trainer = trainer_of()
    order = []
    for name, event in (("val", Events.EPOCH_COMPLETED), ("test", Events.ITERATION_COMPLETED(every=4))):
        evaluator = evaluator_of(model_of(trainer))
        evaluator.add_event_handler(
            Events.COMPLETED, lambda *, name=name: order.append((name, trainer.state.iteration))
        )
        Evaluation(evaluator, numbers_loader(4), name=name).attach(trainer, event)
    state = trainer.run(numbers_loader(), max_epochs=2)

    assert order == [("test", 4), ("val", 6), ("test", 8), ("test", 12), ("val", 12)]
    assert {"val/loss", "test/loss"} <= set(state.metrics) and state.evaluations == 5
    with pytest.raises(ValueError, match="evaluation/val"):
        Evaluation(evaluator_of(model_of(trainer)), [], name="val").attach(trainer)


def test_an_iteration_is_evaluated_once():
    trainer = trainer_of()
    Evaluation(evaluator_of(model_of(trainer)), numbers_loader(4)).attach(
        trainer, Events.ITERATION_COMPLETED(every=3) | Events.EPOCH_COMPLETED | Events.COMPLETED
    )

    assert trainer.run(numbers_loader(8)).evaluations == 2  # at 3, and at 4 once


def test_second_run_evaluates_again():
    trainer = trainer_of()
    Evaluation(evaluator_of(model_of(trainer)), numbers_loader(4)).attach(trainer)
    trainer.run(numbers_loader(8))

    assert trainer.run(numbers_loader(8)).evaluations == 1


@pytest.mark.row("C6")
def test_predictions_reach_handlers():
    trainer, got = trainer_of(), list[Any]()
    evaluator = evaluator_of(model_of(trainer))
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: got.append(evaluator.state.output))
    Evaluation(evaluator, numbers_loader(4)).attach(trainer)
    trainer.run(numbers_loader(4))

    assert [(prediction.shape, target.shape) for prediction, target in got] == [((2, 1), (2, 1))] * 2


@pytest.mark.row("C3")
def test_precision_of_its_own():
    trainer, types = trainer_of(), list[Any]()
    evaluator = evaluator_of(model_of(trainer), precision="bf16")
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: types.append(evaluator.state.output[0].dtype))
    Evaluation(evaluator, numbers_loader(2)).attach(trainer)
    trainer.run(numbers_loader(4))

    assert types == [torch.bfloat16]


def test_evaluator_works_again_after_an_error():
    trainer, failing = trainer_of(), [True]

    def fail_once(model, batch):
        if failing.pop() if failing else False:
            raise OSError("gone")
        return predict(model, batch)

    evaluator = create_evaluator(model_of(trainer), fail_once, {"loss": Loss(nn.functional.mse_loss)})
    Evaluation(evaluator, numbers_loader(4)).attach(trainer)
    with pytest.raises(OSError, match="gone") as caught:
        trainer.run(numbers_loader(4))
    assert caught.value.__notes__[-1] == "Raised by handler Evaluation on EPOCH_COMPLETED."
    assert caught.value.__notes__[0].startswith("The batch: [Tensor [")
    assert model_of(trainer).training
    state = trainer.run(numbers_loader(4))

    assert state.evaluations == 1 and state.metrics["val/loss"] > 0


def test_data_without_a_length_is_measured_at_each_evaluation():
    trainer, evaluator, means = trainer_of(), averaging(), list[float]()
    data = Batches(3, 5, 2)
    Evaluation(evaluator, data).attach(trainer)
    trainer.add_event_handler(
        TrainingEvents.EVALUATION_COMPLETED, lambda: means.append(trainer.state.metrics["val/mean"])
    )
    trainer.run(numbers_loader(4), max_epochs=3)

    assert means == [1.0, 2.0, 0.5] and data.passes == 3


def test_limit_over_data_without_a_length():
    trainer, evaluator, seen = trainer_of(), averaging(), list[int]()
    Evaluation(evaluator, Batches(3, 9, 4), limit=4).attach(trainer)
    trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, lambda: seen.append(evaluator.state.iteration))
    trainer.run(numbers_loader(4), max_epochs=3)

    assert seen == [3, 4, 4]


# -- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("at", [0, 2])
def test_evaluation_interrupted_by_a_stop_is_run_first_by_the_resumed_run(sized, at, tmp_path):
    def make():
        trainer, seen = trainer_of(), list[Any]()

        def note(model, batch):
            seen.append(trainer.state.iteration)
            if stopping and len(seen) == at:
                trainer.request_stop("enough")
            return batch

        evaluator = create_evaluator(model_of(trainer), note, {"mean": Average()})
        data = [torch.tensor([float(index)]) for index in range(5)] if sized else Batches(5, 5, 5)
        Evaluation(evaluator, data).attach(trainer)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        return trainer, checkpoint, seen

    stopping = True
    trainer, _, seen = make()
    if at == 0:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda: trainer.request_stop("enough"))
    state = trainer.run(numbers_loader(), max_epochs=2)
    assert (state.status, state.iteration, state.evaluations) == ("interrupted", 6, 0)
    assert len(seen) == at and "val/mean" not in state.metrics

    stopping = False
    resumed, checkpoint, seen = make()
    checkpoint.resume()
    state = resumed.run(numbers_loader(), max_epochs=2)
    assert seen == [6] * 5 + [12] * 5
    assert (state.evaluations, state.metrics["val/mean"]) == (2, 2.0)


def test_stop_in_an_evaluation_at_the_end_interrupts_the_run_which_then_only_evaluates(tmp_path):
    def make():
        trainer = trainer_of()

        def ask(model, batch):
            if stopping:
                trainer.request_stop("enough")
            return batch

        data = [torch.tensor([float(index)]) for index in range(5)]
        evaluator = create_evaluator(model_of(trainer), ask, {"mean": Average()})
        Evaluation(evaluator, data).attach(trainer, Events.COMPLETED)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        return trainer, checkpoint

    for stopping in (True, True, False):  # in a run that trains; in a finished one; and at last to its end
        trainer, checkpoint = make()
        checkpoint.resume()
        state = trainer.run(numbers_loader(), max_epochs=1)
        status, reason = ("interrupted", "enough") if stopping else ("completed", "max_epochs")
        assert (state.status, state.iteration, state.reason) == (status, 6, reason)
        assert ("val/mean" in state.metrics) is not stopping


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("limit", "last", "event"),
    [
        ({"max_epochs": 2}, 12, Events.EPOCH_COMPLETED),
        ({"max_epochs": 2}, 12, Events.ITERATION_COMPLETED(every=6)),
        ({"max_iters": 12}, 12, Events.EPOCH_COMPLETED),
        ({"max_iters": 10}, 10, Events.ITERATION_COMPLETED(every=5)),
    ],
)
def test_last_checkpoint_of_a_run_stopped_in_its_last_evaluation_is_the_one_after_it(
    limit, last, event, background, tmp_path
):
    def run(folder, stop):
        trainer = trainer_of()

        def ask(model, batch):
            if stop and trainer.state.iteration == last:
                trainer.request_stop("enough")
            return batch

        Evaluation(create_evaluator(model_of(trainer), ask, {"mean": Average()}), averaged).attach(trainer, event)
        checkpoint = Checkpoint(folder, best="val/mean", mode="max", background=background)
        checkpoint.attach(trainer)
        torch.manual_seed(0)
        checkpoint.resume()
        trainer.run(numbers_loader(), **limit)
        newest = checkpoint.store.latest().checkpoint
        assert newest is not None and newest.iteration == last
        assert (trainer.state.status, "val/mean" in newest.manifest.metrics) == (
            ("interrupted", False) if stop else ("completed", True)
        )
        loaded = checkpoint.store.load(newest.path)
        parts = digests({**loaded.shared, **loaded.local})
        del parts["trainer.checkpoints"]  # a stop adds one
        return parts

    averaged = [torch.tensor([float(index)]) for index in range(5)]
    whole = run(tmp_path / "whole", stop=False)
    stopped = run(tmp_path / "cut", stop=True)
    assert stopped != whole
    assert run(tmp_path / "cut", stop=False) == whole


def test_evaluation_interrupted_by_a_stop_fires_no_completed_of_the_evaluator(tmp_path):
    """Handlers of it, such as Ignite's EarlyStopping, read metrics that are not there."""
    trainer, completed = trainer_of(), list[float]()

    def ask(model, batch):
        trainer.request_stop("enough")
        return batch

    evaluator = create_evaluator(model_of(trainer), ask, {"mean": Average()})
    evaluator.add_event_handler(Events.COMPLETED, lambda: completed.append(evaluator.state.metrics["mean"]))
    Evaluation(evaluator, [torch.tensor([1.0])] * 4).attach(trainer)
    Checkpoint(tmp_path).attach(trainer)
    state = trainer.run(numbers_loader(), max_epochs=2)

    assert (state.status, state.iteration, completed) == ("interrupted", 6, [])
    assert state.saved_iteration == 6


@pytest.mark.parametrize("event", [Events.EPOCH_STARTED(once=2), Events.ITERATION_COMPLETED(once=6)])
def test_nothing_is_trained_between_an_interrupted_evaluation_and_the_save(event, tmp_path):
    def run(stop):
        trainer, at = trainer_of(), list[int]()

        def note(model, batch):
            at.append(trainer.state.iteration)
            if stop:
                trainer.request_stop("enough")
            return batch

        Evaluation(create_evaluator(model_of(trainer), note), [torch.tensor([1.0])] * 2).attach(trainer, event)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_epochs=3)
        return trainer, at

    trainer, at = run(stop=True)
    assert (trainer.state.status, trainer.state.saved_iteration, at) == ("interrupted", 6, [6])
    trainer, at = run(stop=False)
    assert (trainer.state.status, trainer.state.evaluations, at) == ("completed", 1, [6, 6])


@pytest.mark.parametrize("event", [TrainingEvents.EVALUATION_STARTED, TrainingEvents.EVALUATION_COMPLETED])
def test_random_numbers_drawn_at_a_repeated_evaluation_change_no_bit(tmp_path, event):
    def run(folder, seed, stop):
        trainer = trainer_of(linear(dropout=True))

        def predict(model, batch):
            if stop:
                trainer.request_stop("enough")
            return batch

        evaluator = create_evaluator(linear(), predict, {"mean": Average()})
        Evaluation(evaluator, [torch.tensor([1.0])] * 2).attach(trainer, Events.ITERATION_COMPLETED(once=2))
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        trainer.add_event_handler(event, lambda: torch.rand(1))  # as who samples from the model there
        torch.manual_seed(seed)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=5)
        return trainer

    whole = run(tmp_path / "whole", 1, stop=False)
    assert run(tmp_path / "cut", 1, stop=True).state.iteration == 2
    resumed = run(tmp_path / "cut", 2, stop=False)

    assert torch.equal(weights(resumed), weights(whole))
