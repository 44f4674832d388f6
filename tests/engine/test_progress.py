"""Counters and data position, in and out of a checkpoint."""

from ignite.engine import Events

from ignite_engine.engine.grouping import Grouping
from ignite_engine.engine.position import EpochIs, Plan, Position
from ignite_engine.engine.progress import Progress
from ignite_engine.engine.saved_progress import parts
from ignite_engine.handlers import Checkpoint
from ignite_engine.state import Start, TrainingState
from ignite_engine.states.resume_state import ResumeState
from ignite_engine.step.micro_batches import Group
from tests.kit.tiny import numbers_loader, trainer_of


def progress_over(data, accumulation_steps=None, position=None):
    progress = Progress(TrainingState(), Grouping(accumulation_steps))
    source = progress.new_source(data)
    plan = Plan(max_epochs=9, epoch_length=source.iterations, epoch_is=EpochIs.A_PASS)
    progress.begin(source, data, plan, position or Position())
    return progress


def place_of(progress):
    assert progress.source is not None
    return progress.source.place


def test_group_counts_when_it_is_consumed():
    progress = progress_over([1, 2, 3, 4, 5], 2)
    groups = progress.open_pass()
    progress.group_fetched(next(groups))
    assert not progress.at_boundary and place_of(progress).batch == 0
    progress.group_consumed()

    assert progress.at_boundary and progress.epoch_iteration == 1 and place_of(progress).batch == 2
    assert progress.plan.epoch_length == 3


def test_discarded_group_does_not_come_again():
    progress = progress_over([1, 2, 3])
    progress.group_fetched(next(progress.open_pass()))
    progress.group_discarded()

    assert progress.epoch_iteration == 0 and list(progress.open_pass()) == [2, 3]


def test_loaded_counters_make_the_next_run_a_resumed_one():
    saved = progress_over([1, 2, 3], position=Position(5, epochs=1, epoch_iteration=2))
    resume = ResumeState()
    progress = Progress(TrainingState(), Grouping())
    parts(progress, resume)["trainer"].load_state_dict(parts(saved, ResumeState())["trainer"].state_dict())

    assert resume.is_pending and progress.state.iteration == 5
    assert (progress.epochs_completed, progress.epoch_iteration, progress.state.epoch) == (1, 2, 1)


def test_checkpoint_that_is_made_before_the_run_is_resumed_at_its_beginning(tmp_path):
    for resumes in (False, True):
        trainer, checkpoint = trainer_of(), Checkpoint(tmp_path)
        checkpoint.attach(trainer, Events.COMPLETED)
        if not resumes:
            checkpoint.save()
            continue
        checkpoint.resume()
        state = trainer.run(numbers_loader(8, 2), max_epochs=2)
        assert (state.start, state.iteration, state.epoch) == (Start.RESUMED, 8, 2)


def test_counters_say_what_was_done_before_an_update_failed():
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
