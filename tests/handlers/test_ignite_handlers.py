"""Ignite's own handlers on our bus, attached as its documentation says; each test asserts what the handler is for."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import (
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    EMAHandler,
    FastaiLRFinder,
    TerminateOnNan,
    TimeLimit,
    global_step_from_engine,
)
from ignite.metrics import MeanSquaredError

from ignite_engine import Trainer, create_evaluator
from ignite_engine.handlers import Evaluation
from tests.kit.tiny import numbers_loader, one, trainer_of, weights


def loss_of(output):
    return float(output["loss"])


def predict(model, batch):
    inputs, targets = batch
    return model(inputs), targets


def constant(engine, batch):
    return 1.0


# -- stopping ----------------------------------------------------------------------------------------------------------


def stops_in(epoch, scores, attach):
    trainer, given = trainer_of(), iter(scores)
    stopping = EarlyStopping(patience=2, score_function=lambda engine: next(given), trainer=trainer)
    attach(trainer, stopping)
    state = trainer.run(numbers_loader(4), max_epochs=10)

    assert (state.epoch, state.status, state.reason) == (epoch, "completed", "terminate")


@pytest.mark.parametrize("by", ["a handler", "Evaluation"])
def test_early_stopping_on_an_evaluator(by):
    """The way of Ignite's documentation: scored on the evaluator, stopping the trainer."""

    def attach(trainer, stopping):
        evaluator = create_evaluator(trainer.update.model, predict)
        evaluator.add_event_handler(Events.COMPLETED, stopping)
        if by == "Evaluation":
            Evaluation(evaluator, numbers_loader(4)).attach(trainer)
        else:
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(numbers_loader(4)))

    stops_in(5, [1, 2, 3, 3, 2, 9], attach)


def test_early_stopping_is_saved_with_the_trainer():
    trainer = trainer_of()
    stopping = EarlyStopping(patience=5, score_function=lambda engine: -engine.state.epoch, trainer=trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, stopping)
    trainer.run(numbers_loader(4), max_epochs=4)
    _, local = trainer.registry.capture()

    again = trainer_of()
    loaded = EarlyStopping(patience=5, score_function=lambda engine: -engine.state.epoch, trainer=again)
    again.registry.load({"ignite/EarlyStopping": local["ignite/EarlyStopping"]}, source="memory")
    again.add_event_handler(Events.EPOCH_COMPLETED, loaded)

    assert (loaded.counter, loaded.best_score) == (stopping.counter, stopping.best_score) == (3, -1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_terminate_on_nan_looks_into_the_updates_output(bad):
    def loss_fn(model, batch):
        inputs, _ = batch
        worse = bad if trainer.state.iteration == 3 else 1.0
        return model(inputs).mean() * 0 + worse

    trainer = trainer_of()
    trainer.update.loss_fn = loss_fn
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    state = trainer.run(numbers_loader(12, 2))

    assert (state.iteration, state.epoch_length, state.reason) == (3, 6, "terminate")


class Clock:
    """Time that passes only where a test says so, for Ignite's timers."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("ignite.handlers.timing.perf_counter", clock)
    monkeypatch.setattr("ignite.handlers.time_limit.time", SimpleNamespace(time=clock))
    return clock


def test_time_limit_ends_the_run(clock):
    trainer = Trainer(lambda engine, batch: clock.sleep(0.4))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(limit_sec=1))
    state = trainer.run(range(20))

    assert (state.iteration, state.status) == (3, "completed")


# -- time --------------------------------------------------------------------------------------------------------------


DATA_S, UPDATE_S, HANDLER_S = 0.5, 3.0, 2.0


EACH = pytest.mark.parametrize(
    "event", [Events.ITERATION_COMPLETED, Events.ITERATION_COMPLETED(every=1)], ids=["plain", "every"]
)


# -- files -------------------------------------------------------------------------------------------------------------


def test_checkpoint_saves_the_best_and_loads_into_another_trainer(tmp_path):
    trainer = trainer_of()
    update = trainer.update
    evaluator = create_evaluator(update.model, predict, {"mse": MeanSquaredError()})
    Evaluation(evaluator, numbers_loader(8, 4)).attach(trainer)
    objects = {"model": update.model, "optimizer": update.optimizers["optimizer"], "trainer": trainer}
    best = Checkpoint(
        objects,
        DiskSaver(str(tmp_path), create_dir=True),
        n_saved=2,
        filename_prefix="best",
        score_function=lambda engine: -engine.state.metrics["mse"],
        score_name="mse",
        global_step_transform=global_step_from_engine(trainer),
    )
    evaluator.add_event_handler(Events.COMPLETED, best)
    trainer.run(numbers_loader(8, 2), max_epochs=3)

    assert len(list(tmp_path.iterdir())) == 2 and best.last_checkpoint is not None
    assert Path(str(best.last_checkpoint)).name.startswith("best_checkpoint_3_mse=-")
    again = trainer_of(torch.nn.Sequential(*[type(layer)(*args) for layer, args in _layers(update.model)]))
    loaded = again.update
    to_load = {"model": loaded.model, "optimizer": loaded.optimizers["optimizer"], "trainer": again}
    Checkpoint.load_objects(to_load, tmp_path / Path(str(best.last_checkpoint)).name)

    assert torch.equal(weights(again), weights(trainer))
    assert (again.state.iteration, again.state.epoch, again.state.max_epochs) == (12, 3, 3)
    state = again.run(numbers_loader(8, 2), max_epochs=4)
    assert (state.iteration, state.epoch) == (16, 4)


def _layers(model):
    return [
        (layer, (layer.in_features, layer.out_features) if hasattr(layer, "in_features") else ()) for layer in model
    ]


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_ema_follows_the_weights_of_each_iteration():
    trainer = trainer_of(lr=1.0)
    update = trainer.update
    ema, expected = EMAHandler(update.model, momentum=0.25), [one(update.model).clone()]
    ema.attach(trainer, event=Events.ITERATION_COMPLETED)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: expected.append(0.75 * expected[-1] + 0.25 * one(update.model))
    )
    trainer.run(numbers_loader(8, 2))

    assert torch.allclose(one(ema.ema_model), expected[-1], atol=1e-6)
    assert not torch.allclose(one(ema.ema_model), weights(trainer), atol=1e-3)


def test_lr_finder_raises_the_rate_and_puts_everything_back():
    trainer = trainer_of(lr=1e-5)
    update = trainer.update
    before, finder = weights(trainer), FastaiLRFinder()
    to_save = {"model": update.model, "optimizer": update.optimizers["optimizer"]}
    with finder.attach(trainer, to_save, loss_of, num_iter=20, end_lr=10.0, diverge_th=1e9) as finding:
        finding.run(numbers_loader(40, 2))
    results = finder.get_results()

    assert results["lr"][0] < 1e-4 < 1.0 < results["lr"][-1] and len(results["loss"]) == 20
    assert torch.equal(weights(trainer), before)
    assert update.optimizers["optimizer"].param_groups[0]["lr"] == 1e-5
    state = trainer.run(numbers_loader(8, 2), max_epochs=2)
    assert (state.iteration, state.optimizer_steps) == (8, 8)
