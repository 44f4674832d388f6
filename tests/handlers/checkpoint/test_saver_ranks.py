"""Two ranks save together: what fails on one fails on both, and what one may do is decided for both."""

import itertools
import time
from typing import Any

import pytest
import torch.distributed as dist
from ignite.engine import Events

from ignite_engine import TrainingEvents
from ignite_engine.checkpointing import CheckpointStore, filesystem
from ignite_engine.handlers import Checkpoint
from ignite_engine.ranks import agreement
from tests.kit.tiny import numbers_loader, on_two_ranks, trainer_of

Answers = dict[str, list[Any]]


class Failing:
    """A state that cannot be saved at one iteration."""

    def __init__(self, trainer, iteration, state):
        self.trainer, self.iteration, self.state = trainer, iteration, state

    def state_dict(self):
        return self.state() if self.trainer.state.iteration == self.iteration else {}

    def load_state_dict(self, state): ...


def trained(folder, *, iteration=-1, state=dict, copy_fails=False, **options):
    """Events by iteration, the last error, and what is on disk after 4 iterations; or the error that ended the run."""
    trainer, events = trainer_of(), list[Any]()
    trainer.register("failing", Failing(trainer, iteration, state))
    checkpoint = Checkpoint(folder, keep_last=9, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=1))
    calls = itertools.count(1)

    def wait():
        if next(calls) == 2 and copy_fails:
            raise RuntimeError("the device is gone")

    checkpoint._saver._snapshot.wait = wait
    for event in (TrainingEvents.CHECKPOINT_SAVED, TrainingEvents.CHECKPOINT_FAILED):
        trainer.add_event_handler(event, lambda name: events.append([name, str(checkpoint.error)]), event.name)
    try:
        trainer.run(numbers_loader(), max_iters=4)
    except Exception as error:
        return [type(error).__name__, str(error), trainer.state.iteration]
    return [events, [each.iteration for each in CheckpointStore(folder).checkpoints()]]


def cases(folder, rank):
    mine = {"raises": lambda: 1 // 0, "foreign": lambda: {"x": object()}}
    answers = {"same": trained(folder / "same")}
    for name, state in mine.items():
        for background in (False, True):
            at = 2 if rank == 1 else -1
            key = f"{name} {background}"
            answers[key] = trained(folder / key, iteration=at, state=state, background=background)
    answers["copy"] = trained(folder / "copy", copy_fails=rank == 1, background=True)
    answers["start"] = trained(folder / "start", iteration=0 if rank == 1 else -1, state=mine["foreign"])
    answers["slow"] = [_seconds_of(folder / f"slow {each}", rank, background=each) for each in (False, True)]
    answers["two handlers"] = [_two_at_once(folder / "two", attempt) for attempt in range(5)]
    before = len(agreement._groups)
    answers["one after another"] = [_two_at_once(folder / "after", attempt) for attempt in range(3)]
    answers["new groups"] = len(agreement._groups) - before
    answers["within"] = _within_a_run(folder / "within")
    dist.barrier()
    answers["held"] = trained(folder / "held")
    return answers


def _seconds_of(folder, rank, *, background):
    """Of a save in which rank 1 is slow."""
    trainer = trainer_of()
    trainer.register("slow", Failing(trainer, 2, lambda: time.sleep(0.3 * rank)))
    checkpoint = Checkpoint(folder, background=background, save_at_end=False)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(once=2))
    trainer.run(numbers_loader(), max_iters=3)
    assert checkpoint.times.saved is not None
    return checkpoint.times.saved.seconds


def _two_at_once(folder, attempt):
    """What two handlers that save in the background at the same boundaries leave behind: reasons that it is invalid."""
    trainer = trainer_of()
    checkpoints = [
        Checkpoint(folder / f"{attempt} {name}", keep_last=9, background=True, name=name) for name in ("one", "other")
    ]
    for each in checkpoints:
        each.attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(numbers_loader(), max_iters=4)
    return [each.store.verify(saved.path) for each in checkpoints for saved in each.store.checkpoints()]


def _within_a_run(folder):
    """What a run and those that a handler of it makes, all saving in the background, leave behind."""
    trainer = trainer_of()
    checkpoints = [Checkpoint(folder / "outer", keep_last=9, background=True)]
    checkpoints[0].attach(trainer, Events.ITERATION_COMPLETED)

    def run_another():
        inner = trainer_of()
        checkpoints.append(Checkpoint(folder / f"inner {len(checkpoints)}", keep_last=9, background=True))
        checkpoints[-1].attach(inner, Events.ITERATION_COMPLETED)
        inner.run(numbers_loader(), max_iters=2)

    trainer.add_event_handler(Events.ITERATION_STARTED, run_another)
    trainer.run(numbers_loader(), max_iters=4)
    return [each.store.verify(saved.path) for each in checkpoints for saved in each.store.checkpoints()]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    with filesystem.held(folder / "held"):
        return on_two_ranks(lambda rank: cases(folder, rank), folder / "store")


@pytest.mark.slow
def test_both_save_where_nothing_fails(two_ranks):
    first, second = two_ranks["same"]
    assert first == second and first[1] == [1, 2, 3, 4]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("name", "line"), [("raises", "ZeroDivisionError"), ("foreign", "failing['x'] is a builtins")])
def test_a_state_of_one_rank_that_cannot_be_saved_fails_the_save_of_both(two_ranks, name, line, background):
    first, second = two_ranks[f"{name} {background}"]
    assert first == second and first[1] == [1, 3, 4]
    failed = [error for event, error in first[0] if event == "CHECKPOINT_FAILED"]
    assert len(failed) == 1 and line in failed[0] and "\n" not in failed[0]


def test_a_copy_that_fails_on_one_rank_fails_the_save_of_both_and_training_goes_on(two_ranks):
    first, second = two_ranks["copy"]
    assert first == second and first[1] == [1, 3, 4]
    assert [event for event, _ in first[0]] == ["CHECKPOINT_SAVED", "CHECKPOINT_FAILED", *["CHECKPOINT_SAVED"] * 2]
    assert "rank 1: RuntimeError: the device is gone" in first[0][1][1]


def test_a_state_of_one_rank_that_cannot_be_saved_is_refused_at_the_start_on_both(two_ranks):
    for kind, error, iteration in two_ranks["start"]:
        assert (kind, iteration) == ("CheckpointError", 0) and error.startswith("failing['x'] is a builtins.object")


def test_two_handlers_save_in_the_background_at_once(two_ranks):
    for rank in two_ranks["two handlers"]:
        assert rank == [[[]] * 8] * 5


def test_a_run_within_another_saves_in_the_background_at_once(two_ranks):
    assert two_ranks["within"] == [[[]] * 12] * 2


def test_runs_one_after_another_use_the_same_groups(two_ranks):
    """Each has threads that wake up 100 times a second for ever; runs that were refused have given theirs back, too."""
    assert two_ranks["new groups"] == [0, 0] and two_ranks["one after another"] == [[[[]] * 8] * 3] * 2


def test_a_folder_in_use_is_refused_on_both(two_ranks):
    for kind, error, iteration in two_ranks["held"]:
        assert (kind, iteration) == ("CheckpointError", 0) and "is in use by process" in error


def test_a_save_takes_as_long_as_the_slowest_rank(two_ranks):
    for seconds in two_ranks["slow"]:
        assert min(seconds) >= 0.3
