"""A run whose metric stopped getting better is over: the same decision on every rank, and after a resume."""

import math
import warnings

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents, create_evaluator
from ignite_engine.handlers import Checkpoint, EarlyStopping, Evaluation, MetricLogger
from tests.kit import saved
from tests.kit.processes import ranks
from tests.kit.tiny import events_of, linear, numbers_loader, trainer_of, weights

FALLING_THEN_FLAT = (5.0, 4.0, 4.0, 3.0, 3.0, 3.5, 3.0, 2.0)
NAN, INF = math.nan, math.inf


def trainer_with(values, key="val/loss", event=Events.EPOCH_COMPLETED):
    """A trainer of 6 batches an epoch that writes the next of ``values`` at each ``event``."""
    trainer = trainer_of()

    def write(trainer):
        number = trainer.state.epoch if event is Events.EPOCH_COMPLETED else trainer.state.iteration
        trainer.state.metrics[key] = values[number - 1]

    trainer.add_event_handler(event, write)
    return trainer


def run(trainer, max_epochs=8, *, key="val/loss", patience=2, folder=None, **options):
    stopping = EarlyStopping(key, patience=patience, **options)
    stopping.attach(trainer)
    if folder is not None:
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
    trainer.run(numbers_loader(), max_epochs=max_epochs)
    return stopping


# -- what ends a run ---------------------------------------------------------------------------------------------------


CASES = [
    # 4.0 is repeated once and 3.0 twice; 3.5 is the second in a row that is not below 3.0
    ({}, FALLING_THEN_FLAT, 6, "was not below 3, 2 times"),
    ({"patience": 1}, (2.0, 1.0, 1.0, 0.0), 3, "was not below 1, 1 times"),
    ({}, (3.0, 3.0, 2.0, 2.0, 1.0), 5, None),  # never twice in a row
    ({"mode": "max"}, (1.0, 2.0, 2.0, 1.5, 9.0), 4, "was not above 2"),
    ({"min_delta": 0.5}, (5.0, 4.75, 4.25, 4.0, 3.75), 5, "was not below 3.75"),  # 4.25 is by 0.75 better than 5.0
    ({"mode": "max", "min_delta": 0.5}, (1.0, 1.5, 1.4, 9.0, 9.0), 3, "was not above 1.5"),
    ({}, (NAN, 1.0, NAN, INF, 0.0), 4, "was not below 1"),
    ({"mode": "max"}, (1.0, INF, INF, 9.0), 3, "was not above 1"),
    ({}, (NAN, NAN, 1.0), 2, "was not finite, 2 times"),
]


@pytest.mark.parametrize(("options", "values", "ended_at", "why"), CASES)
def test_what_ends_a_run_and_that_it_is_over_when_started_again(options, values, ended_at, why, tmp_path):
    first, again = trainer_with(values), trainer_with(values)
    run(first, len(values), folder=tmp_path, **options)
    manifest = saved.manifest(tmp_path)
    seen = events_of(again)
    run(again, len(values), folder=tmp_path, **options)

    for trainer in (first, again):
        state = trainer.state
        assert (state.epoch, state.iteration, state.status) == (ended_at, 6 * ended_at, "completed")
        assert f"early stopping: val/loss {why}" in state.reason if why else state.reason == "max_epochs"
    assert [name for name, *_ in seen if name in ("ITERATION_STARTED", "EPOCH_STARTED", "COMPLETED")] == ["COMPLETED"]
    assert saved.manifest(tmp_path) == manifest
    assert torch.equal(weights(again), weights(first))


def test_a_value_counts_once_however_often_others_are_written():
    trainer = trainer_with((5.0, 5.0, 5.0, 4.0))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(other=1.0))
    run(trainer, 4, patience=3)

    assert trainer.state.iteration == 24  # 5.0 is in state.metrics at 13 iterations, and new at three of them


def test_last_step_boundary_comes_once_and_saves_in_the_middle_of_an_epoch(tmp_path):
    trainer, boundaries = trainer_with([5.0] * 20, event=Events.ITERATION_COMPLETED), []
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT, lambda: boundaries.append((trainer.state.iteration, trainer.state.last))
    )
    run(trainer, patience=3, folder=tmp_path)
    again = trainer_with([5.0] * 20, event=Events.ITERATION_COMPLETED)
    run(again, patience=3, folder=tmp_path)

    assert boundaries == [(1, False), (2, False), (3, False), (4, True)]
    assert saved.iterations(tmp_path) == [4] and (again.state.iteration, again.state.epoch) == (4, 1)


@pytest.mark.row("C7")
def test_ranks_save_the_best_and_stop_by_the_mean_of_their_values(tmp_path):
    def work(rank):
        # alone, rank 0 would never stop and rank 1 would after its second value
        trainer = trainer_with([4.0 - epoch if rank == 0 else 4.0 + epoch for epoch in range(6)])
        stopping = EarlyStopping("val/loss", patience=3)
        stopping.attach(trainer)
        Checkpoint(tmp_path, best="val/loss", keep_last=9).attach(trainer, Events.COMPLETED)
        trainer.run(numbers_loader(), max_epochs=6)
        state = trainer.state
        return state.epoch, state.status, state.reason, stopping.best, stopping.bad

    first, second = ranks(2, work)
    assert first == second == (4, "completed", first[2], 4.0, 3) and "below 4, 3 times" in first[2]
    assert saved.iterations(tmp_path) == [3, 12]  # 3 updates an epoch


# -- starts ------------------------------------------------------------------------------------------------------------


def test_stop_at_the_deciding_value_is_a_stop_and_the_resumed_run_only_completes(tmp_path):
    first = trainer_with(FALLING_THEN_FLAT)
    first.add_event_handler(Events.ITERATION_COMPLETED(once=36), lambda: first.request_stop("enough"))
    run(first, folder=tmp_path)
    resumed = trainer_with(FALLING_THEN_FLAT)
    run(resumed, folder=tmp_path)

    assert (first.state.status, first.state.reason) == ("interrupted", "enough")
    assert (resumed.state.status, resumed.state.iteration, resumed.state.epoch) == ("completed", 36, 6)
    assert "below 3" in resumed.state.reason


def test_finished_run_continues_with_more_patience(tmp_path):
    run(trainer_with(FALLING_THEN_FLAT), folder=tmp_path)
    again = trainer_with(FALLING_THEN_FLAT)
    run(again, folder=tmp_path, patience=4)

    assert (again.state.status, again.state.reason, again.state.epoch) == ("completed", "max_epochs", 8)


def test_another_metric_starts_the_count_over(tmp_path, caplog):
    run(trainer_with(FALLING_THEN_FLAT), folder=tmp_path)
    again = trainer_with([float(-epoch) for epoch in range(8)], key="val/error")
    run(again, key="val/error", folder=tmp_path)

    assert (again.state.epoch, again.state.reason) == (8, "max_epochs")
    assert "val/error (min) now" in caplog.text


@pytest.mark.parametrize(("first", "second", "bad"), [(2, 2, 1), (1, 1, 0)])
def test_second_run_in_one_process_starts_the_count_over(first, second, bad):
    trainer = trainer_with((5.0, 5.0))
    stopping = run(trainer, first)
    trainer.run(numbers_loader(), max_epochs=second)

    assert (trainer.state.epoch, stopping.best, stopping.bad) == (second, 5.0, bad)


def test_value_at_a_look_before_the_resumed_training_does_not_count_twice(tmp_path):
    """An Evaluation at STARTED measures the iteration that was measured before the save."""
    run(trainer_with((5.0, 5.0)), 2, folder=tmp_path, patience=3)
    resumed = trainer_with((5.0, 5.0, 5.0, 5.0))
    resumed.add_event_handler(Events.STARTED, lambda: resumed.state.metrics.update({"val/loss": 5.0}))
    run(resumed, 4, folder=tmp_path, patience=3)

    assert resumed.state.epoch == 4


# -- the metric --------------------------------------------------------------------------------------------------------


def test_name_of_the_metric_says_what_is_better_where_no_mode_is_given(caplog):
    modes = {"val/accuracy": "max", "val/loss": "min"}
    assert {key: EarlyStopping(key, patience=1).mode for key in modes} == modes and caplog.text == ""
    assert EarlyStopping("val/accuracy", patience=1, mode="min").mode == "min" and "smaller" in caplog.text


@pytest.mark.parametrize(
    ("key", "warned_at"),
    [
        ("loss", 8),  # the update's may be written after that of an evaluation
        ("val/acuracy", 2),  # its group was written, without it
        ("test/accuracy", 7),
    ],
)
def test_metric_that_nothing_writes_is_one_warning_as_soon_as_it_is_sure(key, warned_at):
    trainer, evaluator = Trainer(lambda engine, batch: 1.0), create_evaluator(linear(), lambda model, batch: batch)
    evaluator.add_event_handler(Events.COMPLETED, lambda: evaluator.state.metrics.update(accuracy=0.5))
    Evaluation(evaluator, [1], name="val").attach(trainer, Events.ITERATION_COMPLETED(once=2))
    MetricLogger(console=False).attach(trainer, Events.EPOCH_COMPLETED)
    EarlyStopping(key, patience=9, mode="max").attach(trainer)
    at = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.add_event_handler(
            TrainingEvents.RESUME_POINT, lambda: at.append(sum(key in str(each.message) for each in caught))
        )
        trainer.run(range(6))
        at.append(sum(key in str(each.message) for each in caught))

    assert at == [0] * (warned_at - 1) + [1] * (8 - warned_at)
