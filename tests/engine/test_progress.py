"""Counters and data position, in and out of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from ignite_engine.engine.progress import Progress
from ignite_engine.state import TrainingState
from ignite_engine.states.resume_state import ResumeState
from ignite_engine.step.micro_batches import Group


def progress_over(data: Any, accumulation_steps: int | None = None) -> Progress:
    progress = Progress(TrainingState(), ResumeState(), accumulation_steps)
    progress.use(progress.new_source(data), data)
    progress.state.dataloader, progress.state.epoch_length = data, progress.iterations
    return progress


def test_group_counts_when_it_is_consumed() -> None:
    progress = progress_over([1, 2, 3, 4, 5], 2)
    groups = progress.open_pass()
    progress.group_fetched(next(groups))
    assert not progress.at_boundary and progress.source is not None and progress.source.position.batch == 0
    progress.group_consumed()

    assert progress.at_boundary and progress.epoch_iteration == 1 and progress.source.position.batch == 2
    assert progress.iterations == 3


def test_discarded_group_does_not_come_again() -> None:
    progress = progress_over([1, 2, 3])
    progress.group_fetched(next(progress.open_pass()))
    progress.group_discarded()

    assert progress.epoch_iteration == 0 and list(progress.open_pass()) == [2, 3]


def test_loaded_counters_make_the_next_run_a_resumed_one() -> None:
    saved = progress_over([1, 2, 3])
    saved.state.iteration, saved.epochs_completed, saved.epoch_iteration = 5, 1, 2
    resume = ResumeState()
    progress = Progress(TrainingState(), resume, None)
    progress.parts()["trainer"].load_state_dict(saved.parts()["trainer"].state_dict())

    assert resume.counters and progress.state.iteration == 5
    assert (progress.epochs_completed, progress.epoch_iteration, progress.state.epoch) == (1, 2, 1)


@pytest.mark.parametrize(("now", "epoch_iteration"), [(2, 2), (4, 1), (1, 4)])
def test_position_in_the_epoch_follows_from_the_data_where_groups_have_another_size(
    now: int, epoch_iteration: int
) -> None:
    progress = progress_over(list(range(8)), now)
    counters = progress.state_dict() | {"epoch_iteration": 2, "accumulation_steps": 2, "iteration": 2}
    progress.load_state_dict(counters)
    assert progress.source is not None
    progress.source.position.batch, progress.whole_passes = 4, True
    progress.regroup()

    assert progress.epoch_iteration == epoch_iteration


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
