"""A time limit or a stop file takes effect at a step boundary, saved, and the run has the reason."""

import os
import threading

import pytest
from ignite.engine import Events

from ignite_engine import TrainingEvents, create_evaluator, every
from ignite_engine.handlers import Checkpoint, Evaluation, WallClockLimit
from ignite_engine.handlers.limits import StopFile
from tests.kit import saved
from tests.kit.refusals import refusals
from tests.kit.tiny import numbers_loader, trainer_of

EACH = Events.ITERATION_COMPLETED


def passing(clock, seconds, folder=None, event=EACH(every=1000), **options):  # noqa: B008  # immutable
    """A trainer each of whose updates takes so long, which saves where a folder is given."""
    trainer, slow = trainer_of(), options.pop("slow", None)
    if slow is not None:
        slow_saves(trainer, clock, *slow)
    if folder is not None:
        Checkpoint(folder, keep_last=100, **options).attach(trainer, event)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: clock.move(seconds))
    return trainer


def evaluates(trainer, event, each_batch):
    """Up to a hundred batches at the event; the iterations of those that were made."""
    batches = []

    def predict(model, batch):
        each_batch()
        batches.append(trainer.state.iteration)

    Evaluation(create_evaluator(trainer.update.model, predict), [0] * 100).attach(trainer, event)
    return batches


def slow_saves(trainer, clock, seconds, patch):
    """Each save takes so long; one in the background goes by when the end of the run waits for it, no sooner.

    Call it before a Checkpoint is attached.
    """
    at_the_end, rename = threading.Event(), os.rename

    def slowly(source, target, **options):
        if "iteration_" in str(target) and "trash" not in str(target):
            if threading.current_thread() is not threading.main_thread():
                assert at_the_end.wait(30)
            clock.move(seconds)
        rename(source, target, **options)

    patch.setattr(os, "rename", slowly)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: trainer.state.last and at_the_end.set())
    for event in (Events.STARTED, TrainingEvents.CHECKPOINT_SAVED):  # as measured, and by a run before
        trainer.add_event_handler(event, lambda: setattr(trainer.state, "save_seconds", seconds))


@pytest.mark.row("D1")
@pytest.mark.parametrize(("event", "expected"), [(EACH(every=1000), [3, 6, 9, 10]), (EACH(once=2), [2, 3, 6, 9, 10])])
def test_saved_every_so_many_minutes(event, expected, clock, tmp_path):
    trainer = passing(clock, 20.0, tmp_path, event | every(minutes=1))
    assert trainer.run(numbers_loader(20), max_epochs=1).status == "completed"
    assert saved.iterations(tmp_path) == expected


@pytest.mark.parametrize(
    ("options", "save_s", "gap_s", "stops_at"),
    [
        ({"margin_s": 0.0}, 0.0, 0.0, 59),
        ({"margin_s": 0.0}, 15.0, 0.0, 29),  # two saves
        ({}, 0.0, 0.0, 56),  # a twentieth: 3 s
        ({"margin_s": 0.0}, 0.0, 30.0, 29),  # a long gap is not the time of an iteration
    ],
)
def test_what_saves_and_a_margin_take_is_taken_off(options, save_s, gap_s, stops_at, clock):
    trainer = passing(clock, 1.0)
    trainer.add_event_handler(EACH(once=2), lambda: setattr(trainer.state, "save_seconds", save_s))
    trainer.add_event_handler(EACH(once=20), lambda: clock.move(gap_s))
    WallClockLimit(minutes=1, **options).attach(trainer)
    assert trainer.run(numbers_loader(4), max_iters=1000).iteration == stops_at


@pytest.mark.parametrize("background", [False, True])
def test_save_due_just_before_the_stop_leaves_time_for_the_last_one(background, clock, tmp_path, monkeypatch):
    """Whichever iteration it is due at: updates of 1 s, saves of 15 s, a limit of 60 s."""

    def run(due):
        folder, began = tmp_path / str(due), clock.now
        with monkeypatch.context() as patch:
            slow = (15.0, patch)
            trainer = passing(clock, 1.0, folder, EACH(once=due), background=background, slow=slow)
            WallClockLimit(minutes=1, margin_s=0).attach(trainer)
            assert trainer.run(numbers_loader(4), max_iters=1000).status == "interrupted"
        return saved.iterations(folder), clock.now - began

    ends = {due: run(due) for due in (2, 14, 27, 28, 29, 45)}
    assert max(seconds for _, seconds in ends.values()) == 59.0
    assert ends[28] == ([28, 29], 59.0)  # begun after 28 s, it leaves 16 s for an update and the last save
    assert ends[45] == ([29], 44.0)


def test_limit_interrupts_an_evaluation_in_time_for_a_save_in_flight_and_the_last_one(clock, tmp_path, monkeypatch):
    began = clock.now
    trainer = passing(clock, 0.0, tmp_path, EACH(once=2), background=True, slow=(15.0, monkeypatch))
    batches = evaluates(trainer, EACH(once=3), lambda: clock.move(1.0))
    WallClockLimit(seconds=60, margin_s=1).attach(trainer)
    state = trainer.run(numbers_loader(20), max_epochs=1)

    assert (state.status, state.reason, state.evaluations) == ("interrupted", "time limit of 60 s", 0)
    assert (batches, clock.now - began, saved.iterations(tmp_path)) == ([3] * 29, 59.0, [2, 3])


test_refusals = refusals(
    [
        ("no limit", lambda: WallClockLimit(), ValueError, "limit above 0 s got 0 s"),
        ("nan", lambda: WallClockLimit(hours=float("nan")), ValueError, "limit above 0 s got nan"),
        ("margin", lambda: WallClockLimit(seconds=20, margin_s=20), ValueError, "margin_s below got 20 s and 20 s"),
    ]
)


def test_file_that_appears_stops_the_run_saved(clock, tmp_path):
    trainer, path = passing(clock, 1.0, tmp_path / "saved"), tmp_path / "stop"
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: path.touch())
    StopFile(path).attach(trainer)
    state = trainer.run(numbers_loader(20), max_epochs=1)

    assert (state.status, state.reason) == ("interrupted", f"stop file {path}")
    assert (state.iteration, saved.iterations(tmp_path / "saved"), path.exists()) == (4, [4], True)


def test_file_of_before_has_no_effect_until_it_is_touched_again(clock, tmp_path):
    (path := tmp_path / "stop").touch()
    for touched, status in ((None, "completed"), (2, "interrupted")):
        trainer = passing(clock, 1.0, tmp_path / str(touched))
        StopFile(path).attach(trainer)
        if touched:
            trainer.add_event_handler(Events.ITERATION_STARTED(once=touched), lambda: path.touch())
        assert trainer.run(numbers_loader(20), max_epochs=1).status == status


@pytest.mark.parametrize(("event", "at"), [(Events.STARTED, 0), (EACH(once=2), 2)])
def test_file_interrupts_an_evaluation_which_is_left_as_it_was(event, at, clock, tmp_path):
    trainer, looked = passing(clock, 0.0, tmp_path / "saved"), []

    def each_batch():
        clock.move(0.4)
        looked.append(len(looked))
        if len(looked) == 5:
            (tmp_path / "stop").touch()

    batches = evaluates(trainer, event, each_batch)
    StopFile(tmp_path / "stop").attach(trainer)
    state = trainer.run(numbers_loader(20), max_epochs=1)
    assert (state.status, state.iteration, state.evaluations) == ("interrupted", at, 0)
    assert 5 <= len(batches) <= 8 and saved.iterations(tmp_path / "saved") == [at]
