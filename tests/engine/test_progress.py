"""Counters and data position, in and out of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, seed_everything
from ignite_engine.data.place import Place
from ignite_engine.engine.grouping import Grouping
from ignite_engine.engine.position import EpochIs, Plan, Position
from ignite_engine.engine.progress import Progress
from ignite_engine.engine.saved_progress import parts
from ignite_engine.handlers import Checkpoint, LRSchedule
from ignite_engine.schedules import warmup_cosine
from ignite_engine.state import Start, TrainingState
from ignite_engine.states.resume_state import ResumeState
from ignite_engine.step.micro_batches import Group
from tests.builders import linear, numbers_loader, on_two_ranks, trainer_of, weights


def progress_over(data: Any, accumulation_steps: int | None = None, position: Position | None = None) -> Progress:
    progress = Progress(TrainingState(), Grouping(accumulation_steps))
    source = progress.new_source(data)
    plan = Plan(max_epochs=9, epoch_length=source.iterations, epoch_is=EpochIs.A_PASS)
    progress.begin(source, data, progress.grouping, plan, position or Position(), fresh=True)
    return progress


def place_of(progress: Progress) -> Place:
    assert progress.source is not None
    return progress.source.place


def test_group_counts_when_it_is_consumed() -> None:
    progress = progress_over([1, 2, 3, 4, 5], 2)
    groups = progress.open_pass()
    progress.group_fetched(next(groups))
    assert not progress.at_boundary and place_of(progress).batch == 0
    progress.group_consumed()

    assert progress.at_boundary and progress.epoch_iteration == 1 and place_of(progress).batch == 2
    assert progress.plan.epoch_length == 3


def test_discarded_group_does_not_come_again() -> None:
    progress = progress_over([1, 2, 3])
    progress.group_fetched(next(progress.open_pass()))
    progress.group_discarded()

    assert progress.epoch_iteration == 0 and list(progress.open_pass()) == [2, 3]


def test_loaded_counters_make_the_next_run_a_resumed_one() -> None:
    saved = progress_over([1, 2, 3], position=Position(5, epochs=1, epoch_iteration=2))
    resume = ResumeState()
    progress = Progress(TrainingState(), Grouping())
    parts(progress, resume)["trainer"].load_state_dict(parts(saved, ResumeState())["trainer"].state_dict())

    assert resume.is_pending and progress.state.iteration == 5
    assert (progress.epochs_completed, progress.epoch_iteration, progress.state.epoch) == (1, 2, 1)


def test_checkpoint_that_is_made_before_the_run_is_resumed_at_its_beginning(tmp_path: Path) -> None:
    for resumes in (False, True):
        trainer, checkpoint = trainer_of(), Checkpoint(tmp_path)
        checkpoint.attach(trainer, Events.COMPLETED)
        if not resumes:
            checkpoint.save()
            continue
        checkpoint.resume()
        state = trainer.run(numbers_loader(8, 2), max_epochs=2)
        assert (state.start, state.iteration, state.epoch) == (Start.RESUMED, 8, 2)


def test_counters_say_what_was_done_before_an_update_failed() -> None:
    class Update:
        stepping = False

    progress = progress_over([1, 2, 3])
    progress.state.iteration = 4
    progress.group_fetched(Group([1]))
    with progress.before_the_failure(Update()) as weights_agree:
        assert weights_agree and progress.state.iteration == 3
    assert progress.state.iteration == 4
    with progress.before_the_failure(lambda engine, batch: None) as weights_agree:
        assert not weights_agree  # a plain function does not say whether it has stepped


# --- accumulation that changes during a run ---------------------------------------------------------------------------


def growing(
    folder: Path | None,
    stop: int | None = None,
    count: int = 22,
    epochs: int = 4,
    max_iters: int | None = None,
) -> tuple[Trainer, list[int]]:
    """Four epochs of 11 batches; from the third on three of them are an iteration. The sizes of all groups."""
    trainer, sizes = trainer_of(linear(dropout=True), accumulation_steps=1), []
    LRSchedule(warmup_cosine(trainer.update.optimizers["optimizer"], warmup=2)).attach(trainer)

    def change(trainer: Trainer) -> None:
        if trainer.state.epoch == 2:
            trainer.accumulation_steps = 3

    trainer.add_event_handler(Events.EPOCH_COMPLETED, change)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda trainer: sizes.append(len(trainer.state.batch)))
    if folder is not None:
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer, Events.COMPLETED)
        checkpoint.resume()
    if stop is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda trainer: trainer.request_stop("asked"))
    trainer.run(numbers_loader(count, shuffle=True), max_epochs=epochs, max_iters=max_iters)
    return trainer, sizes


@pytest.mark.parametrize("stop", [5, 11, 21, 22, 23, 26, 28])
def test_changed_accumulation_counts_from_the_next_pass_on_and_is_resumed_exactly(
    tmp_path: Path, stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    seed_everything(3)
    whole, sizes = growing(None)
    seed_everything(3)
    _, before = growing(tmp_path, stop)
    resumed, after = growing(tmp_path)

    assert sizes == [1] * 22 + [3, 3, 3, 2] * 2
    assert before + after == sizes
    assert torch.equal(weights(whole), weights(resumed))
    assert (resumed.state.iteration, resumed.state.epoch) == (30, 4)
    assert resumed.reproducibility() == [] and "other bits" not in caplog.text
    assert "new curve" not in caplog.text  # the schedule keeps the length with which the run began


@pytest.mark.parametrize("event", [Events.EPOCH_STARTED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
def test_changed_accumulation_leaves_the_pass_that_is_read_as_it_is(event: Any) -> None:
    trainer, sizes = trainer_of(accumulation_steps=2), list[int]()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: sizes.append(len(trainer.state.batch)))
    place = event(once=1 if event is Events.EPOCH_STARTED else 2)
    trainer.add_event_handler(place, lambda: setattr(trainer, "accumulation_steps", 4))
    trainer.run(numbers_loader(8, 1), max_epochs=2)

    assert sizes == [2] * 4 + [4] * 2


def test_schedule_over_a_longer_run_follows_it_also_where_the_accumulation_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    growing(tmp_path, 26)
    growing(tmp_path, epochs=5)

    assert "its schedule with it: from here on the LR follows the new curve" in caplog.text


@pytest.mark.parametrize("max_iters", [40, 50])
def test_of_two_limits_the_first_is_the_length_with_which_a_schedule_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_iters: int
) -> None:
    """Four epochs were 44 iterations when the run began, and are 30 since its accumulation has changed."""
    growing(tmp_path, 26, max_iters=max_iters)
    resumed, _ = growing(tmp_path, max_iters=max_iters)

    assert resumed.state.iteration == 30 and "new curve" not in caplog.text


def test_changed_accumulation_is_asked_for_in_a_trainer_that_groups() -> None:
    trainer = trainer_of(accumulation_steps=2)
    trainer.accumulation_steps = 4
    assert trainer.run(numbers_loader(16), max_epochs=1).iteration == 2
    with pytest.raises(ValueError, match="accumulation_steps must be a whole number of at least 1, got 0"):
        trainer.accumulation_steps = 0
    with pytest.raises(ValueError, match=r"this one has no grouping: make it Trainer\(update, accumulation_steps=1\)"):
        trainer_of().accumulation_steps = 2


def test_a_run_that_starts_over_groups_as_it_was_built() -> None:
    trainer, _ = growing(None)
    assert trainer.accumulation_steps == 3
    trainer.state.max_epochs = None
    trainer.run(numbers_loader(22), max_epochs=1)

    assert trainer.accumulation_steps == 1 and trainer.state.iteration == 11


@pytest.mark.distributed
def test_two_ranks_change_their_accumulation_together(tmp_path: Path) -> None:
    answers = on_two_ranks(lambda rank: {"sizes": growing(None, count=42)[1]}, tmp_path / "meeting")

    assert answers["sizes"][0][:22] == answers["sizes"][1][:22] == [1] * 22
    assert answers["sizes"][0][22:] == [3, 3, 3, 2] * 2 and len(answers["sizes"][1]) == 30
