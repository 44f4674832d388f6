"""An evaluation that was stopped goes on where it was, to the bits of a whole one; or starts over."""

import logging
import time
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average, EpochMetric, Loss
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ignite_engine import TrainingEvents, create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation, StopFile, WallClockLimit
from tests.kit.tiny import Numbers, numbers_loader, trainer_of


def spread(predictions, targets):
    return (predictions.std() + targets.std()).item()


def metrics():
    return {
        "loss": Loss(nn.functional.mse_loss),
        "spread": EpochMetric(spread),
        "drawn": Average(output_transform=lambda output: output[0].mean()),
    }


class Run:
    """A run of 12 updates that evaluates after update 6 and update 12, in 10 batches each, with random predictions."""

    def __init__(self, folder, *, data=None, **options):
        self.trainer, self.folder = trainer_of(), folder
        self.model = self.trainer.update.model
        self.numbers = Numbers(20)
        self.batches = []
        """The iteration of each batch that was evaluated."""
        self.seen = lambda count: None
        """Called with the number of batches evaluated so far, before each."""

        def predict(model, batch):
            self.seen(len(self.batches))
            self.batches.append(self.trainer.state.iteration)
            return model(batch[0]) * torch.rand(1), batch[1]

        self.evaluator = create_evaluator(self.model, predict, options.pop("metrics", None) or metrics())
        data = loader(self.numbers, 2) if data is None else data
        self.evaluation = Evaluation(self.evaluator, data, resumes=True, **options)
        self.evaluation.attach(self.trainer, Events.ITERATION_COMPLETED(every=6))
        self.measured = []
        self.trainer.add_event_handler(
            TrainingEvents.EVALUATION_COMPLETED, lambda: self.measured.append(dict(self.trainer.state.metrics))
        )
        self.checkpoint = Checkpoint(folder / "checkpoints")
        self.checkpoint.attach(self.trainer, Events.ITERATION_COMPLETED(every=4))

    def train(self):
        """To the end, from the newest checkpoint if there is one; the metrics of each evaluation."""
        # what a resumed run draws it has from its checkpoint
        torch.manual_seed(5 if self.checkpoint.resume() is None else 99)
        self.trainer.run(numbers_loader(12, shuffle=True), max_epochs=2)
        return self.measured

    def cut_off(self, at):
        """Stop it in the evaluation, when ``at`` batches of it were evaluated."""

        def cut(count):
            if count == at - 1:
                self.trainer.request_stop("enough")

        self.seen = cut
        self.train()
        assert self.trainer.state.status == "interrupted"
        assert len(self.batches) == at and not self.measured


@pytest.fixture
def whole(tmp_path):
    run = Run(tmp_path / "whole")
    found = run.train()
    assert run.batches == [6] * 10 + [12] * 10 and len(found) == 2
    return found


@pytest.mark.parametrize("at", [1, 8])
def test_stopped_evaluation_goes_on_to_the_same_bits(at, tmp_path, whole):
    Run(tmp_path).cut_off(at)
    resumed = Run(tmp_path)
    assert resumed.train() == whole
    assert resumed.trainer.state.evaluations == 2
    assert resumed.batches == [6] * (10 - at) + [12] * 10
    assert resumed.numbers.loaded == [*range(2 * at, 20), *range(20)], "what is skipped was loaded"


@pytest.mark.parametrize("change", [{"limit": 9}, {"metrics": {"loss": Loss(nn.functional.mse_loss)}}])
def test_another_evaluation_starts_at_its_first_batch(change, tmp_path):
    Run(tmp_path).cut_off(8)
    resumed = Run(tmp_path, **change)
    resumed.train()
    assert resumed.batches == [6] * change.get("limit", 10) + [12] * change.get("limit", 10)


class Drawn:
    """Ten batches in an order that is drawn in each pass."""

    def __iter__(self):
        numbers = Numbers(20)
        for places in torch.randperm(20).split(2):
            yield numbers.inputs[places], numbers.targets[places]


def test_order_that_is_drawn_goes_on_as_it_was_begun(tmp_path):
    whole = Run(tmp_path / "whole", data=Drawn()).train()
    Run(tmp_path, data=Drawn()).cut_off(8)
    assert Run(tmp_path, data=Drawn()).train() == whole


def test_it_may_be_stopped_again_and_again(tmp_path, whole):
    for at in (4, 2, 1):
        Run(tmp_path).cut_off(at)
    last = Run(tmp_path)
    assert last.train() == whole
    assert last.batches == [6] * 6 + [12] * 10  # from the first stop: its checkpoint is that of this iteration


def test_handlers_of_the_evaluator_count_on(tmp_path):
    Run(tmp_path).cut_off(8)
    resumed, counted = Run(tmp_path), list[int]()
    resumed.evaluator.add_event_handler(
        Events.ITERATION_COMPLETED(every=2), lambda: counted.append(resumed.evaluator.state.iteration)
    )
    resumed.train()

    assert counted == [10, 2, 4, 6, 8, 10]


class Stream(IterableDataset[Any]):
    """Without a length and without a state; remembers what it gave."""

    def __init__(self):
        self.given = []

    def __iter__(self):
        numbers = Numbers(20)
        for index in range(20):
            self.given.append(index)
            yield numbers[index]


def test_stream_without_a_state_is_replayed(tmp_path, caplog):
    def run(folder):
        return Run(folder, data=DataLoader(Stream(), batch_size=2), limit=9)

    expected = run(tmp_path / "whole").train()
    run(tmp_path).cut_off(7)
    resumed = run(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert resumed.train() == expected
    assert resumed.batches == [6] * 2 + [12] * 9
    assert "the 7 batches that were consumed are loaded again and skipped" in caplog.text


# -- evaluations that the resumed run has to repeat -------------------------------------------------------------------


def evaluated(trainer, event, seen):
    """Attach an evaluation with random predictions; gets ``(iteration, value)`` of each."""
    found = list[Any]()

    def predict(model, batch):
        seen()
        return torch.rand(1)

    evaluator = create_evaluator(trainer.update.model, predict, {"drawn": Average()})
    Evaluation(evaluator, [0] * 5).attach(trainer, event)
    trainer.add_event_handler(
        TrainingEvents.EVALUATION_COMPLETED,
        lambda: found.append((trainer.state.iteration, trainer.state.metrics["val/drawn"])),
    )
    return found


@pytest.mark.parametrize("event", [Events.STARTED, Events.ITERATION_COMPLETED(every=3), Events.EPOCH_COMPLETED])
def test_evaluation_stopped_twice_is_run_by_the_resumed_run_at_its_iteration(event, tmp_path):
    """Without ``resumes``: from its first batch, at its iteration, from the random numbers that it would have had."""

    def run(folder, stop_at):
        trainer, count = trainer_of(), [0]

        def seen():
            count[0] += 1
            if count[0] == stop_at:
                trainer.request_stop("enough")

        found = evaluated(trainer, event, seen)
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100))
        torch.manual_seed(5 if checkpoint.resume() is None else 99)
        trainer.run(numbers_loader(12), max_epochs=2)
        return trainer, found

    _, whole = run(tmp_path / "whole", None)
    first, nothing = run(tmp_path / "cut", 2)
    stopped_at = first.state.iteration
    second, nothing_more = run(tmp_path / "cut", 3)
    assert (first.state.status, second.state.status) == ("interrupted", "interrupted")
    assert second.state.iteration == stopped_at == whole[0][0], "it trained past the evaluation"
    _, found = run(tmp_path / "cut", None)
    assert nothing == nothing_more == [] and found == whole


def test_training_loader_is_evaluated_whole_in_a_resumed_epoch(tmp_path):
    """The loader is in the middle of its pass, for the training only."""

    def run(folder, updates):
        trainer, data = trainer_of(), numbers_loader(12, shuffle=True)
        model = trainer.update.model
        evaluator = create_evaluator(model, lambda model, batch: batch[0], {"mean": Average()})
        Evaluation(evaluator, data).attach(trainer, Events.ITERATION_COMPLETED(every=5))
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
        checkpoint.resume()
        counted, ran, places = list[Any](), evaluator.state, list[int]()
        for event in (TrainingEvents.EVALUATION_STARTED, TrainingEvents.EVALUATION_COMPLETED):
            trainer.add_event_handler(event, lambda: places.append(data.sampler.start))
        trainer.add_event_handler(
            TrainingEvents.EVALUATION_COMPLETED, lambda: counted.append((ran.iteration, ran.metrics["mean"]))
        )
        trainer.run(data, max_iters=updates)
        assert len(set(places)) < 2, "the loader did not get its place back"
        return counted

    whole = run(tmp_path / "whole", 6)
    assert run(tmp_path / "cut", 4) == []
    resumed = run(tmp_path / "cut", 6)
    assert [count for count, _ in whole] == [count for count, _ in resumed] == [6]
    assert torch.equal(whole[0][1], resumed[0][1])


def test_old_stop_file_does_not_stop_an_evaluation_at_the_start(tmp_path):
    (tmp_path / "stop").touch()
    trainer = trainer_of()
    evaluated(trainer, Events.STARTED, lambda: None)
    StopFile(tmp_path / "stop").attach(trainer)

    assert trainer.run(numbers_loader(12), max_epochs=1).status == "completed"


def test_limit_stops_before_training_in_an_evaluation_at_the_start():
    trainer = trainer_of()
    evaluated(trainer, Events.STARTED, lambda: time.sleep(0.02))
    WallClockLimit(seconds=0.05, margin_s=0).attach(trainer)
    state = trainer.run(numbers_loader(12), max_epochs=2)

    assert (state.status, state.iteration, state.evaluations) == ("interrupted", 0, 0)


def test_stop_file_stops_before_training_in_an_evaluation_at_the_start(tmp_path):
    trainer = trainer_of()
    evaluated(trainer, Events.STARTED, lambda: (tmp_path / "stop").touch())
    StopFile(tmp_path / "stop").attach(trainer)
    state = trainer.run(numbers_loader(12), max_epochs=2)

    assert (state.status, state.iteration, state.evaluations) == ("interrupted", 0, 0)
