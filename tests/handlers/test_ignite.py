"""Ignite's own handlers, metrics and loggers on our bus, attached as its documentation says."""

from collections import deque
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import (
    Checkpoint,
    DiskSaver,
    FastaiLRFinder,
    global_step_from_engine,
)
from ignite.metrics import Average, Frequency, MeanSquaredError, MetricsLambda, RunningAverage

from ignite_engine import create_evaluator
from ignite_engine.handlers import Evaluation
from tests.kit.tiny import numbers_loader, trainer_of, weights


def loss_of(output):
    return float(output["loss"])


def losses_of(trainer):
    """Gets the loss of each iteration."""
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(loss_of(trainer.state.output)))
    return losses


def predict(model, batch):
    inputs, targets = batch
    return model(inputs), targets


# -- files, averages and rates -----------------------------------------------------------------------------------------


def test_checkpoint_saves_the_best_and_loads_into_another_trainer(tmp_path):
    def objects(trainer):
        update = trainer.update
        return {"model": update.model, "optimizer": update.optimizers["optimizer"], "trainer": trainer}

    trainer = trainer_of()
    evaluator = create_evaluator(trainer.update.model, predict, {"mse": MeanSquaredError()})
    Evaluation(evaluator, numbers_loader(8, 4)).attach(trainer)
    best = Checkpoint(
        objects(trainer),
        DiskSaver(str(tmp_path), create_dir=True),
        n_saved=2,
        filename_prefix="best",
        score_function=lambda engine: -engine.state.metrics["mse"],
        score_name="mse",
        global_step_transform=global_step_from_engine(trainer),
    )
    evaluator.add_event_handler(Events.COMPLETED, best)
    trainer.run(numbers_loader(8, 2), max_epochs=3)
    name = Path(str(best.last_checkpoint)).name
    assert len(list(tmp_path.iterdir())) == 2 and name.startswith("best_checkpoint_3_mse=-")

    again = trainer_of()
    Checkpoint.load_objects(objects(again), tmp_path / name)
    assert torch.equal(weights(again), weights(trainer))
    state = again.run(numbers_loader(8, 2), max_epochs=4)
    assert (state.iteration, state.epoch) == (16, 4)


def test_lr_finder_raises_the_rate_and_puts_everything_back():
    trainer = trainer_of(lr=1e-5)
    optimizer, before, finder = trainer.update.optimizers["optimizer"], weights(trainer), FastaiLRFinder()
    to_save = {"model": trainer.update.model, "optimizer": optimizer}
    with finder.attach(trainer, to_save, loss_of, num_iter=20, end_lr=10.0, diverge_th=1e9) as finding:
        finding.run(numbers_loader(40, 2))
    results = finder.get_results()

    assert results["lr"][0] < 1e-4 < 1.0 < results["lr"][-1] and len(results["loss"]) == 20
    assert torch.equal(weights(trainer), before) and optimizer.param_groups[0]["lr"] == 1e-5
    state = trainer.run(numbers_loader(8, 2), max_epochs=2)
    assert (state.iteration, state.optimizer_steps) == (8, 8)


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_on_the_trainer_are_those_of_each_epoch():
    trainer, epochs = trainer_of(), []
    losses = losses_of(trainer)
    Average(output_transform=loss_of).attach(trainer, "mean")
    doubled = Average(output_transform=lambda output: 2 * loss_of(output))
    MetricsLambda(lambda value: value + 1.0, doubled).attach(trainer, "twice")
    RunningAverage(alpha=0.75, output_transform=loss_of).attach(trainer, "running")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: epochs.append(dict(trainer.state.metrics)))
    trainer.run(numbers_loader(6, 2), max_epochs=2)

    running = losses[0]
    for loss in losses[1:]:
        running = 0.75 * running + 0.25 * loss
    means = [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert [each["mean"] for each in epochs] == pytest.approx(means)
    assert [each["twice"] for each in epochs] == pytest.approx([2 * mean + 1 for mean in means])
    assert epochs[1]["running"] == pytest.approx(running)


def test_metric_that_cannot_be_saved_is_in_the_exactness_report():
    class Recent(Average):
        def reset(self):
            super().reset()
            self.recent = deque([0.0])

    trainer = trainer_of()
    Recent(output_transform=loss_of).attach(trainer, "recent")
    Frequency(output_transform=lambda output: 2).attach(trainer, "samples/s")  # of which nothing is to be saved
    Average(output_transform=loss_of).attach(trainer, "mean")
    trainer.run(numbers_loader(6, 2))

    (line,) = trainer.reproducibility()
    assert "Recent" in line and "deque" in line
