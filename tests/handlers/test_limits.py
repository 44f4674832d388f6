"""A time limit or a stop file takes effect at a step boundary, saved, and the run has the reason."""

import logging
import os
import threading
import time

import pytest
import torch
from ignite.engine import Events

from ignite_engine import TrainingEvents, create_evaluator
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.engine.boundary import StepBoundary
from ignite_engine.engine.bus import handlers_of
from ignite_engine.handlers import Checkpoint, Evaluation, SaveEvery, StopFile, WallClockLimit, limits
from tests.kit.tiny import numbers_loader, trainer_of, weights


class Clock:
    """Stands still but for what the test lets go by."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    return clock


def saving(directory):
    trainer = trainer_of()
    Checkpoint(directory, keep_last=100).attach(trainer, Events.ITERATION_COMPLETED(every=1000))
    return trainer


def passing(trainer, clock, seconds):
    """Let each update take so long."""

    @trainer.on(Events.ITERATION_STARTED)
    def go_by():
        clock.now += seconds


def slow_saves(trainer, clock, seconds, monkeypatch):
    """Let each save take so long; one in the background goes by when the end of the run waits for it, no sooner.

    Call it before a Checkpoint is attached.
    """
    at_the_end, save = threading.Event(), CheckpointStore.save

    def slowly(self, *args, **options):
        if threading.current_thread() is not threading.main_thread():
            assert at_the_end.wait(30)
        clock.now += seconds
        return save(self, *args, **options)

    monkeypatch.setattr(CheckpointStore, "save", slowly)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: trainer.state.last and at_the_end.set())
    # as measured, here and by a save before
    for event in (Events.STARTED, TrainingEvents.CHECKPOINT_SAVED):
        trainer.add_event_handler(event, lambda: setattr(trainer.state, "save_seconds", seconds))


def saved(directory):
    return [each.iteration for each in CheckpointStore(directory).checkpoints()]


# -- saves ------------------------------------------------------------------------------------------------------------


@pytest.mark.row("D1")
def test_saved_every_so_many_minutes(clock, tmp_path):
    trainer = saving(tmp_path)
    passing(trainer, clock, 20.0)
    SaveEvery(minutes=1).attach(trainer)
    state = trainer.run(numbers_loader(20), max_epochs=1)

    assert (state.status, state.iteration, saved(tmp_path)) == ("completed", 10, [3, 6, 9, 10])


def test_minutes_count_from_the_last_save_whatever_it_was_for(clock, tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path, keep_last=100).attach(trainer, Events.ITERATION_COMPLETED(once=2))
    passing(trainer, clock, 20.0)
    SaveEvery(minutes=1).attach(trainer)
    trainer.run(numbers_loader(20), max_epochs=1)

    assert saved(tmp_path) == [2, 5, 8, 10]


def test_saves_by_the_clock_leave_the_training_alone(clock, tmp_path):
    trainer, other = saving(tmp_path), trainer_of()
    passing(trainer, clock, 60.0)
    SaveEvery(minutes=1).attach(trainer)
    trainer.run(numbers_loader(shuffle=True), max_epochs=2)
    other.run(numbers_loader(shuffle=True), max_epochs=2)

    assert len(saved(tmp_path)) == 12 and torch.equal(weights(trainer), weights(other))


# -- the time limit ---------------------------------------------------------------------------------------------------


def test_limit_stops_the_run_saved_and_returns(clock, tmp_path):
    trainer = saving(tmp_path)
    passing(trainer, clock, 10.0)
    WallClockLimit(hours=1, margin_s=0).attach(trainer)
    state = trainer.run(numbers_loader(4), max_iters=1000)

    assert (state.status, state.reason) == ("interrupted", "time limit of 3600 s")
    # after 359 updates of 10 s another one would end on the limit
    assert (state.iteration, saved(tmp_path)) == (359, [359])


def test_what_two_saves_take_and_a_margin_are_taken_off(clock, tmp_path):
    def stopped_at(save_s, **options):
        trainer = trainer_of()
        passing(trainer, clock, 1.0)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=2), lambda: setattr(trainer.state, "save_seconds", save_s)
        )
        WallClockLimit(minutes=1, **options).attach(trainer)
        return trainer.run(numbers_loader(4), max_iters=1000).iteration

    assert stopped_at(0.0, margin_s=0.0) == 59
    assert stopped_at(15.0, margin_s=0.0) == 29
    assert stopped_at(15.0, margin_s=10.0) == 19
    assert stopped_at(0.0) == 56  # a twentieth: 3 s


@pytest.mark.parametrize("background", [False, True])
def test_save_due_just_before_the_stop_leaves_time_for_the_last_one(background, clock, tmp_path, monkeypatch):
    """Whichever iteration it is due at: updates of 1 s, saves of 15 s, a limit of 60 s."""

    def run(due):
        trainer, began, folder = trainer_of(), clock.now, tmp_path / str(due)
        with monkeypatch.context() as patch:
            slow_saves(trainer, clock, 15.0, patch)
            Checkpoint(folder, background=background).attach(trainer, Events.ITERATION_COMPLETED(once=due))
            passing(trainer, clock, 1.0)
            WallClockLimit(minutes=1, margin_s=0).attach(trainer)
            assert trainer.run(numbers_loader(4), max_iters=1000).status == "interrupted"
        return saved(folder), clock.now - began

    ends = {due: run(due) for due in (2, 13, 14, 15, *range(26, 31), 43, 44, 45)}

    assert max(seconds for _, seconds in ends.values()) == 59.0
    assert ends[28] == ([28, 29], 59.0)  # begun after 28 s, it leaves 16 s for an update and the last save
    assert ends[45] == ([29], 44.0)


def test_one_long_gap_does_not_count_as_the_time_of_an_iteration(clock):
    """An evaluation of 30 s between two updates of 1 s does not end the run 30 s early."""
    trainer = trainer_of()
    passing(trainer, clock, 1.0)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=20), lambda: setattr(clock, "now", clock.now + 30.0))
    WallClockLimit(seconds=60, margin_s=0).attach(trainer)

    assert trainer.run(numbers_loader(4), max_iters=1000).iteration == 29


def test_limit_counts_from_the_given_start(clock):
    trainer = trainer_of()
    passing(trainer, clock, 1.0)
    WallClockLimit(seconds=60, margin_s=0, since=clock.now - 20).attach(trainer)

    assert trainer.run(numbers_loader(4), max_iters=1000).iteration == 39


def test_each_run_has_its_limit(clock):
    trainer = trainer_of()
    passing(trainer, clock, 1.0)
    WallClockLimit(seconds=10, margin_s=0).attach(trainer)
    first = trainer.run(numbers_loader(4), max_iters=100).iteration
    clock.now += 1000.0

    assert (first, trainer.run(numbers_loader(4), max_iters=100).iteration) == (9, 18)


def test_limit_interrupts_an_evaluation(clock, tmp_path):
    trainer, batches = saving(tmp_path), list[int]()

    def predict(model, batch):
        clock.now += 10.0
        batches.append(trainer.state.iteration)

    Evaluation(create_evaluator(trainer.update.model, predict), [0] * 100).attach(
        trainer, Events.ITERATION_COMPLETED(once=2)
    )
    WallClockLimit(minutes=5, margin_s=0).attach(trainer)
    state = trainer.run(numbers_loader(20), max_epochs=1)

    assert (state.status, state.reason, state.iteration) == ("interrupted", "time limit of 300 s", 2)
    assert (batches, state.evaluations, saved(tmp_path)) == ([2] * 30, 0, [2])


def test_evaluation_is_interrupted_in_time_for_a_save_in_flight_and_the_last_one(clock, tmp_path, monkeypatch):
    trainer, batches, began = trainer_of(), list[int](), clock.now
    slow_saves(trainer, clock, 15.0, monkeypatch)
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(once=2))

    def predict(model, batch):
        clock.now += 1.0
        batches.append(trainer.state.iteration)

    Evaluation(create_evaluator(trainer.update.model, predict), [0] * 100).attach(
        trainer, Events.ITERATION_COMPLETED(once=3)
    )
    WallClockLimit(seconds=60, margin_s=1).attach(trainer)
    state = trainer.run(numbers_loader(20), max_epochs=1)

    assert (state.status, state.evaluations, saved(tmp_path)) == ("interrupted", 0, [2, 3])
    assert (batches, clock.now - began) == ([3] * 29, 59.0)


def test_evaluator_is_as_before_after_an_evaluation():
    trainer = trainer_of()
    evaluator = create_evaluator(trainer.update.model, lambda model, batch: None)
    Evaluation(evaluator, [0]).attach(trainer)
    WallClockLimit(hours=1).attach(trainer)
    StopFile("never").attach(trainer)
    during = list[bool]()
    evaluator.add_event_handler(
        Events.COMPLETED, lambda: during.append(len(evaluator._event_handlers[Events.ITERATION_COMPLETED]) == 2)
    )
    trainer.run(numbers_loader(4), max_epochs=3)

    assert during == [True] * 3 and not evaluator._event_handlers[Events.ITERATION_COMPLETED]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "The limit must be above 0 s, got 0 s"),
        ({"minutes": -1}, "The limit must be above 0 s, got -60 s"),
        ({"hours": float("nan")}, "The limit must be above 0 s, got nan s"),
        ({"seconds": 20, "margin_s": 20}, "margin_s must be at least 0 and below the limit of 20 s, got 20"),
        ({"seconds": 20, "margin_s": -1}, "margin_s must be at least 0"),
    ],
)
def test_limit_refuses_what_makes_no_sense(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        WallClockLimit(**settings)
    with pytest.raises(ValueError, match="minutes must be a number above 0, got 0"):
        SaveEvery(minutes=0)


# -- the stop file ----------------------------------------------------------------------------------------------------


def test_file_that_appears_stops_the_run_saved(clock, tmp_path):
    trainer, path = saving(tmp_path / "saved"), tmp_path / "stop"
    passing(trainer, clock, 1.0)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: path.touch())
    StopFile(path).attach(trainer)
    state = trainer.run(numbers_loader(20), max_epochs=1)

    assert (state.status, state.reason) == ("interrupted", f"stop file {path}")
    assert (state.iteration, saved(tmp_path / "saved"), path.exists()) == (4, [4], True)


def test_file_is_where_it_was_wherever_the_run_goes(clock, tmp_path, monkeypatch):
    trainer = trainer_of()
    passing(trainer, clock, 1.0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    StopFile("stop").attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: monkeypatch.chdir(tmp_path / "elsewhere"))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: (tmp_path / "stop").touch())
    assert trainer.run(numbers_loader(20), max_epochs=1).iteration == 4


def test_file_is_looked_for_once_a_second(clock, tmp_path, monkeypatch):
    trainer, looks = trainer_of(), list[int]()
    passing(trainer, clock, 0.25)
    stat = os.stat

    def count(path, *args, **kwargs):
        if str(path).endswith("stop"):
            looks.append(trainer.state.iteration)
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", count)
    StopFile(tmp_path / "stop").attach(trainer)
    trainer.run(numbers_loader(20), max_epochs=1)

    assert looks == [0, 1, 5, 9]


def test_old_file_does_not_stop_the_next_run_and_a_touch_does(clock, tmp_path, caplog):
    path = tmp_path / "stop"
    path.touch()

    def run(touch_at):
        trainer = trainer_of()
        passing(trainer, clock, 1.0)
        trainer.add_event_handler(
            Events.ITERATION_STARTED(once=touch_at), lambda: os.utime(path, ns=(0, time.time_ns()))
        )
        StopFile(path).attach(trainer)
        return trainer.run(numbers_loader(20), max_epochs=1)

    with caplog.at_level(logging.WARNING):
        assert (run(touch_at=99).status, run(touch_at=3).iteration) == ("completed", 3)
    lines = [record.getMessage() for record in caplog.records if "stop file" in record.getMessage()]
    said = f"The stop file {path} existed before this run and does not stop it: touch it again to stop, or remove it."
    assert lines == [said] * 2


def test_file_interrupts_an_evaluation(clock, tmp_path):
    trainer, batches = saving(tmp_path / "saved"), list[int]()

    def predict(model, batch):
        clock.now += 0.4
        batches.append(len(batches))
        if len(batches) == 5:
            (tmp_path / "stop").touch()

    Evaluation(create_evaluator(trainer.update.model, predict), [0] * 100).attach(
        trainer, Events.ITERATION_COMPLETED(once=2)
    )
    StopFile(tmp_path / "stop").attach(trainer)
    state = trainer.run(numbers_loader(20), max_epochs=1)

    assert (state.status, state.iteration, state.evaluations) == ("interrupted", 2, 0)
    assert 5 <= len(batches) <= 8 and saved(tmp_path / "saved") == [2]


def test_quiet_iterations_ask_for_nothing(tmp_path, monkeypatch):
    """None of the three makes the Trainer visit its step boundary."""
    trainer = trainer_of()
    for handler in (SaveEvery(minutes=60), WallClockLimit(hours=1), StopFile(tmp_path / "stop")):
        handler.attach(trainer)
    edges = list[int]()
    monkeypatch.setattr(StepBoundary, "at", lambda boundary, *, last: edges.append(trainer.state.iteration))
    trainer.run(numbers_loader(8), max_epochs=2)

    assert edges == [4, 8] and not handlers_of(trainer, TrainingEvents.RESUME_POINT)
