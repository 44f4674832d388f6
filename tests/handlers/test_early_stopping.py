"""A run whose metric stopped getting better is over: the same decision on every rank, and after a resume."""

import math

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average

from ignite_engine import TrainingEvents, create_evaluator
from ignite_engine.handlers import Checkpoint, EarlyStopping, Evaluation
from tests.kit.tiny import events_of, numbers_loader, trainer_of, weights
from tests.ranks.forkserver import on_ranks

FALLING_THEN_FLAT = (5.0, 4.0, 4.0, 3.0, 3.0, 3.5, 3.0, 2.0)


def trainer_with(values, key="val/loss", event=Events.EPOCH_COMPLETED):
    """A trainer that writes the next of ``values`` at each ``event``, by the number of the epoch or the iteration."""
    trainer = trainer_of()

    def write(trainer):
        number = trainer.state.epoch if event is Events.EPOCH_COMPLETED else trainer.state.iteration
        trainer.state.metrics[key] = values[number - 1]

    trainer.add_event_handler(event, write)
    return trainer


def run(trainer, max_epochs=8, *, patience=2, folder=None, **options):
    stopping = EarlyStopping("val/loss", patience=patience, **options)
    stopping.attach(trainer)
    if folder is not None:
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
    trainer.run(numbers_loader(), max_epochs=max_epochs)
    return stopping


def test_run_completes_after_patience_values_without_improvement():
    trainer = trainer_with(FALLING_THEN_FLAT)
    run(trainer)
    state = trainer.state

    # 4.0 is repeated once and 3.0 twice; 3.5 is the second in a row that is not below 3.0
    assert (state.epoch, state.iteration) == (6, 36)
    assert (state.status, state.reason) == (
        "completed",
        "early stopping: val/loss was not below 3, 2 times in a row",
    )


@pytest.mark.parametrize(
    ("options", "values", "ended_at"),
    [
        ({"mode": "max"}, (1.0, 2.0, 2.0, 1.5, 9.0), 4),
        ({"mode": "min", "min_delta": 0.5}, (5.0, 4.75, 4.25, 4.0, 3.75), 5),  # 4.25 is by 0.75 better than 5.0
        ({"mode": "max", "min_delta": 0.5}, (1.0, 1.5, 1.4, 9.0, 9.0), 3),
        ({"patience": 1}, (2.0, 1.0, 1.0, 0.0), 3),
        ({}, (math.nan, 1.0, math.nan, math.inf, 0.0), 4),
        ({}, (math.nan, math.nan, 1.0), 2),
        ({}, (3.0, 3.0, 2.0, 2.0, 1.0), 5),  # never twice in a row
    ],
)
def test_what_counts_as_an_improvement(options, values, ended_at):
    trainer = trainer_with(values)
    run(trainer, len(values), **options)

    assert trainer.state.epoch == ended_at
    assert str(trainer.state.reason).startswith("early stopping") is (options != {} or math.isnan(values[0]))


def test_a_value_counts_once_however_often_others_are_written():
    trainer = trainer_with((5.0, 5.0, 5.0, 4.0))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(other=1.0))
    run(trainer, 4, patience=3)

    assert trainer.state.iteration == 24  # 5.0 is in state.metrics at 13 iterations, and new at three of them


def test_last_step_boundary_comes_once_and_saves(tmp_path):
    """In the middle of an epoch, and where nothing else asked for a save."""
    trainer = trainer_with([5.0] * 20, event=Events.ITERATION_COMPLETED)
    boundaries = []
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT, lambda: boundaries.append((trainer.state.iteration, trainer.state.last))
    )
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    run(trainer, patience=3)

    assert boundaries == [(1, False), (2, False), (3, False), (4, True)]
    assert [each.iteration for each in checkpoint.store.checkpoints()] == [4]
    assert (trainer.state.status, trainer.state.epoch) == ("completed", 1)


@pytest.mark.row("C7")
@pytest.mark.parametrize("cut", [6, 17, 24, 29])
def test_resumed_run_ends_at_the_same_value(tmp_path, cut):
    whole = trainer_with(FALLING_THEN_FLAT)
    run(whole)
    first = trainer_with(FALLING_THEN_FLAT)
    first.add_event_handler(Events.ITERATION_COMPLETED(once=cut), lambda: first.request_stop("enough"))
    run(first, folder=tmp_path)
    resumed = trainer_with(FALLING_THEN_FLAT)
    stopping = run(resumed, folder=tmp_path)

    assert (first.state.status, first.state.iteration) == ("interrupted", cut)
    assert (resumed.state.iteration, resumed.state.reason) == (whole.state.iteration, whole.state.reason)
    assert torch.equal(weights(resumed), weights(whole))
    assert (stopping.best, stopping.bad) == (3.0, 2)


def test_stop_at_the_deciding_value_is_a_stop_and_the_resumed_run_only_completes(tmp_path):
    first = trainer_with(FALLING_THEN_FLAT)
    first.add_event_handler(Events.ITERATION_COMPLETED(once=36), lambda: first.request_stop("enough"))
    run(first, folder=tmp_path)
    resumed = trainer_with(FALLING_THEN_FLAT)
    run(resumed, folder=tmp_path)

    assert (first.state.status, first.state.reason) == ("interrupted", "enough")
    assert (resumed.state.status, resumed.state.iteration, resumed.state.epoch) == ("completed", 36, 6)
    assert str(resumed.state.reason).startswith("early stopping: val/loss was not below 3")


def test_decision_before_a_cut_off_evaluation_comes_after_the_epoch_has_completed(tmp_path):
    """Two evaluations at an epoch's last iteration, a stop in the second, and the first one's value ends the run."""

    def run_in(folder, stop):
        trainer = trainer_of()

        def predict(model, batch):
            if stop and trainer.state.epoch == 2:
                trainer.request_stop("enough")
            return batch

        at = Events.ITERATION_COMPLETED(every=6)
        for name, process in (("val", lambda model, batch: batch), ("test", predict)):
            evaluator = create_evaluator(trainer.update.model, process, {"loss": Average()})
            Evaluation(evaluator, [torch.tensor([1.0])] * 2, name=name).attach(trainer, at)
        seen = events_of(trainer, (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED))
        metrics = list[tuple[str, int]]()
        trainer.add_event_handler(
            TrainingEvents.METRICS_READY, lambda: metrics.extend((key, 0) for key in trainer.state.metrics.fresh)
        )
        run(trainer, 4, patience=1, folder=folder)
        assert trainer.state.status == ("interrupted" if stop else "completed")
        return [*[(name, iteration) for name, _, iteration in seen], *metrics]

    whole = run_in(tmp_path / "whole", stop=False)
    assert ("EPOCH_COMPLETED", 12) in whole
    cut = run_in(tmp_path / "cut", stop=True) + run_in(tmp_path / "cut", stop=False)
    assert sorted(cut) == sorted(whole)


@pytest.mark.parametrize(
    ("event", "values", "ended_at"),
    [(Events.EPOCH_COMPLETED, FALLING_THEN_FLAT, 36), (Events.ITERATION_COMPLETED, [5.0] * 7 + [6.0] * 9, 3)],
)
def test_finished_run_started_again_trains_nothing_and_saves_nothing(tmp_path, event, values, ended_at):
    first = trainer_with(values, event=event)
    run(first, folder=tmp_path)
    assert first.state.iteration == ended_at  # at the end of an epoch, and in its middle
    saved = {path: path.read_bytes() for path in tmp_path.rglob("manifest.json")}
    again = trainer_with(values, event=event)
    seen = []
    again.add_event_handler(Events.ITERATION_STARTED | Events.EPOCH_STARTED, lambda: seen.append("trained"))
    again.add_event_handler(Events.COMPLETED, lambda: seen.append("completed"))
    run(again, folder=tmp_path)

    assert seen == ["completed"]
    assert {path: path.read_bytes() for path in tmp_path.rglob("manifest.json")} == saved
    for name in ("status", "reason", "iteration", "epoch"):
        assert getattr(again.state, name) == getattr(first.state, name), name
    assert torch.equal(weights(again), weights(first))


def test_finished_run_continues_with_more_patience(tmp_path):
    run(trainer_with(FALLING_THEN_FLAT), folder=tmp_path)
    again = trainer_with(FALLING_THEN_FLAT)
    run(again, folder=tmp_path, patience=4)

    assert (again.state.status, again.state.reason, again.state.epoch) == ("completed", "max_epochs", 8)


def test_another_metric_starts_the_count_over(tmp_path, caplog):
    run(trainer_with(FALLING_THEN_FLAT), folder=tmp_path)
    again = trainer_with([float(-epoch) for epoch in range(8)], key="val/other")
    EarlyStopping("val/other", patience=2).attach(again)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(again)
    checkpoint.resume()
    again.run(numbers_loader(), max_epochs=8)

    assert (again.state.epoch, again.state.reason) == (8, "max_epochs")
    assert "follows val/other (min) now: best value and count start over" in caplog.text


def test_second_run_in_one_process_starts_the_count_over():
    trainer = trainer_with((5.0, 5.0, 5.0, 5.0))
    stopping = run(trainer, 2)  # one value without improvement
    trainer.run(numbers_loader(), max_epochs=2)

    assert (trainer.state.epoch, stopping.bad) == (2, 1)


def test_first_value_of_a_second_run_counts_where_the_last_one_of_the_first_stood():
    trainer = trainer_with((5.0,))
    stopping = run(trainer, 1)
    trainer.run(numbers_loader(), max_epochs=1)

    assert (stopping.best, stopping.bad) == (5.0, 0)


def test_value_at_a_look_before_the_resumed_training_does_not_count_twice(tmp_path):
    """An Evaluation at STARTED measures the iteration that was measured before the save."""
    run(trainer_with((5.0, 5.0)), 2, folder=tmp_path, patience=3)
    resumed = trainer_with((5.0, 5.0, 5.0, 5.0))
    resumed.add_event_handler(Events.STARTED, lambda: resumed.state.metrics.update({"val/loss": 5.0}))
    run(resumed, 4, folder=tmp_path, patience=3)

    assert resumed.state.epoch == 4


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"patience": 0}, "patience must be at least 1 value without improvement, got 0."),
        ({"patience": 1, "mode": "lower"}, "mode must be 'min' or 'max', got 'lower'."),
        ({"patience": 1, "min_delta": -1.0}, "min_delta must be a number of at least 0, got -1.0;"),
        ({"patience": 1, "min_delta": math.nan}, "min_delta must be a number of at least 0, got nan;"),
    ],
)
def test_settings_out_of_range_are_refused(options, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        EarlyStopping("val/loss", **options)


def _one_of_two_ranks(rank, folder):
    # this rank's own values: alone, rank 0 would never stop and rank 1 would after its second value
    trainer = trainer_with([4.0 - epoch for epoch in range(6)] if rank == 0 else [4.0 + epoch for epoch in range(6)])
    stopping = EarlyStopping("val/loss", patience=3)
    stopping.attach(trainer)
    checkpoint = Checkpoint(f"{folder}/checkpoints", best="val/loss", keep_last=9)
    checkpoint.attach(trainer, Events.COMPLETED)
    trainer.run(numbers_loader(), max_epochs=6)
    state = trainer.state
    saved = [each.iteration for each in checkpoint.store.checkpoints()]
    torch.save([state.epoch, state.status, state.reason, stopping.best, stopping.bad, saved], f"{folder}/{rank}.pt")


@pytest.mark.row("C7")
@pytest.mark.timeout(120)  # ranks that decide otherwise wait for each other
@pytest.mark.distributed
def test_two_ranks_save_the_best_and_stop_by_the_mean_of_their_values(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))

    assert first == second
    reason = "early stopping: val/loss was not below 4, 3 times in a row"
    assert first == [4, "completed", reason, 4.0, 3, [3, 12]]  # 3 updates an epoch


@pytest.mark.parametrize(
    ("options", "values", "ended_at", "why"),
    [
        ({"stopping_threshold": 3.0}, FALLING_THEN_FLAT, 4, "is 3, as good as stopping_threshold=3"),
        (
            {"mode": "max", "stopping_threshold": 4.5},
            (1.0, 4.0, 5.0, 6.0),
            3,
            "is 5, as good as stopping_threshold=4.5",
        ),
        ({"divergence_threshold": 5.0}, (5.0, 4.0, 9.0, 1.0), 3, "is 9, worse than divergence_threshold=5"),
        ({"divergence_threshold": 5.0}, (4.0, math.nan, 1.0), 2, "is nan, worse than divergence_threshold=5"),
        ({"mode": "max", "divergence_threshold": 0.5}, (1.0, 0.25, 1.0), 2, "is 0.25, worse than divergence_thresh"),
        ({"stopping_threshold": 1.0, "divergence_threshold": 9.0}, (5.0, 6.0, 7.0, 8.0), 4, None),
    ],
)
def test_thresholds_end_the_run_at_once_and_again_after_a_resume(tmp_path, options, values, ended_at, why):
    trainer = trainer_with(values)
    run(trainer, len(values), patience=None, folder=tmp_path, **options)
    again = trainer_with(values)
    run(again, len(values), patience=None, folder=tmp_path, **options)

    assert trainer.state.epoch == again.state.epoch == ended_at
    assert again.state.iteration == trainer.state.iteration
    reasons = [str(each.state.reason) for each in (trainer, again)]
    assert all(reason.startswith(f"early stopping: val/loss {why}" if why else "max_epochs") for reason in reasons)


def test_stopping_that_nothing_would_cause_is_refused():
    with pytest.raises(
        ValueError, match="needs patience, stopping_threshold or divergence_threshold: got none of them"
    ):
        EarlyStopping("val/loss")
    with pytest.raises(TypeError, match="stopping_threshold must be a number, or None, got 'low'"):
        EarlyStopping("val/loss", stopping_threshold="low")


def test_name_of_the_metric_says_what_is_better_where_no_mode_is_given():
    modes = {"val/accuracy": "max", "val/loss": "min", "score": "min"}
    assert {key: EarlyStopping(key, patience=1).mode for key in modes} == modes
    assert EarlyStopping("val/accuracy", patience=1, mode="min").mode == "min"
