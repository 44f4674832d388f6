"""Two ranks save together: what fails on one fails on both, and what one may do is decided for both."""

import threading
from functools import partial

import pytest
from ignite.engine import Events
from torch import nn

from ignite_engine import TrainingEvents
from ignite_engine.errors import CheckpointError
from ignite_engine.handlers import Checkpoint
from tests.kit import saved
from tests.kit.processes import ranks, start, wait_until
from tests.kit.tiny import linear, numbers_loader, trainer_of

EACH = Events.ITERATION_COMPLETED


class Failing:
    """A state that cannot be saved at one iteration."""

    def __init__(self, trainer, iteration, state):
        self.trainer, self.iteration, self.state = trainer, iteration, state

    def state_dict(self):
        return self.state() if self.trainer.state.iteration == self.iteration else {}

    def load_state_dict(self, state): ...


def trained(rank, folder, *, iteration=-1, state=dict, **options):
    """Events of its saves and their errors; or the error that ended the run, and where."""
    trainer, events = trainer_of(), []
    trainer.register("failing", Failing(trainer, iteration if rank == 1 else -1, state))
    checkpoint = Checkpoint(folder, keep_last=9, **options)
    checkpoint.attach(trainer, EACH)
    for event in (TrainingEvents.CHECKPOINT_SAVED, TrainingEvents.CHECKPOINT_FAILED):
        trainer.add_event_handler(event, lambda name: events.append((name, str(checkpoint.error))), event.name)
    try:
        trainer.run(numbers_loader(), max_iters=4)
    except Exception as error:
        return type(error).__name__, str(error), trainer.state.iteration
    return events


UNSAVABLE = {"raises": (lambda: 1 // 0, "ZeroDivisionError"), "an object": (lambda: {"x": object()}, "failing['x']")}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("case", UNSAVABLE)
def test_a_state_of_one_rank_that_cannot_be_saved_fails_the_save_of_both(case, background, tmp_path):
    state, words = UNSAVABLE[case]
    first, second = ranks(2, partial(trained, folder=tmp_path, iteration=2, state=state, background=background))
    assert first == second and saved.iterations(tmp_path) == [1, 3, 4]
    assert sorted(name for name, _ in first) == ["CHECKPOINT_FAILED", *["CHECKPOINT_SAVED"] * 3]
    (failed,) = [error for name, error in first if name == "CHECKPOINT_FAILED"]
    assert words in failed and "\n" not in failed


def test_it_is_refused_at_the_start_on_both(tmp_path):
    for kind, error, iteration in ranks(
        2, partial(trained, folder=tmp_path, iteration=0, state=UNSAVABLE["an object"][0])
    ):
        assert (kind, iteration) == ("CheckpointError", 0) and "failing['x']" in error


def holds(folder):
    trainer = trainer_of()
    Checkpoint(folder).attach(trainer, Events.COMPLETED)
    trainer.add_event_handler(Events.STARTED, lambda: (folder / "held").touch())
    trainer.add_event_handler(EACH, lambda: wait_until((folder / "go").exists))
    trainer.run(numbers_loader(), max_iters=1)


def test_a_folder_in_use_is_refused_on_both(tmp_path):
    other = start(holds, tmp_path)
    wait_until((tmp_path / "held").exists, other)
    for kind, error, iteration in ranks(2, trained, tmp_path):
        assert (kind, iteration) == ("CheckpointError", 0) and "in use by process" in error
    (tmp_path / "go").touch()
    other.answer()


def problems_of(checkpoints):
    return [each.store.verify(found.path) for each in checkpoints for found in each.store.checkpoints()]


def two_at_once(rank, folder):
    """What handlers that save in the background at the same boundaries leave: of a trainer, and of one within it."""
    trainer = trainer_of()
    checkpoints = [Checkpoint(folder / name, keep_last=9, background=True, name=name) for name in ("one", "other")]
    for each in checkpoints:
        each.attach(trainer, EACH)

    def run_another():
        inner = trainer_of()
        checkpoints.append(Checkpoint(folder / f"inner {len(checkpoints)}", keep_last=9, background=True))
        checkpoints[-1].attach(inner, EACH)
        inner.run(numbers_loader(), max_iters=2)

    trainer.add_event_handler(Events.ITERATION_STARTED(every=2), run_another)
    trainer.run(numbers_loader(), max_iters=4)
    threads = threading.active_count()
    trainer.run(numbers_loader(), max_iters=4)
    return problems_of(checkpoints), threading.active_count() - threads


def test_several_save_in_the_background_at_once_and_leave_no_thread(tmp_path):
    assert ranks(2, two_at_once, tmp_path) == [([[]] * 16, 0)] * 2


def saves_now(rank, folder):
    model = nn.parallel.DistributedDataParallel(linear(dropout=True))
    trainer, checkpoint = trainer_of(model), Checkpoint(folder)
    checkpoint.attach(trainer, Events.COMPLETED)
    trainer.add_event_handler(EACH(once=2), lambda: checkpoint.save())
    trainer.run(numbers_loader(16), max_iters=4)
    before, after = saved.iterations(folder), checkpoint.save()
    new = Checkpoint(folder, must_be_new=True)
    new.attach(trainer_of())
    with pytest.raises(CheckpointError, match="must_be_new") as refused:
        new.resume()
    return before, str(after), str(refused.value)


def test_two_ranks_save_now(tmp_path):
    first, second = ranks(2, saves_now, tmp_path)
    assert first == second and first[:2] == ([2, 4], str(saved.checkpoint(tmp_path, 4)))
