"""Meters are exact over intervals, ranks and resumes, and cost MetricLogger no second collective."""

import math

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.handlers import Meter, MetricLogger, Stopwatch
from ignite_engine.handlers.meters import Running
from tests.handlers.test_metric_logger import reads_counted
from tests.handlers.test_sinks import lines
from tests.kit.collectives import Collectives
from tests.kit.tiny import numbers_loader, on_two_ranks, resume_and_run, trainer_of


def of_outputs(trainer):
    for how in ("sum", "mean", "max", "min"):
        trainer.state.meters[f"{how} of a"] = Meter(how, of="a")


def test_meters_of_a_value_that_the_update_returns(tmp_path):
    trainer = Trainer(lambda engine, batch: {"a": torch.tensor(float(batch)), "loss": 0.0})
    of_outputs(trainer)
    MetricLogger(tmp_path, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run([3, 1, 5])

    head = {"epoch": 1, "loss": 0.0}
    assert lines(tmp_path / "metrics.jsonl") == [
        {"iteration": 2, **head, "a": 2.0, "sum of a": 4.0, "mean of a": 2.0, "max of a": 3.0, "min of a": 1.0},
        {"iteration": 3, **head, "a": 5.0, "sum of a": 5.0, "mean of a": 5.0, "max of a": 5.0, "min of a": 5.0},
    ]


def test_meter_of_what_it_is_given_is_read_at_the_log_point_only():
    trainer = Trainer(lambda engine, batch: None)
    meter = trainer.state.meters["steps"] = Meter("sum")
    trainer.state.meters["never"] = Meter("max")
    seen = []

    @trainer.on(Events.ITERATION_STARTED)
    def count():
        value = torch.full((1,), float(trainer.state.iteration), requires_grad=True)
        with reads_counted() as reads:
            meter.update(value)
            meter.update(0.5)
        value.data.zero_()
        assert reads.total() == 0

    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: seen.append(dict(trainer.state.metrics.fresh)))
    trainer.run(range(4))

    assert seen == [{"steps": 1 + 2 + 1}, {"steps": 3 + 4 + 1}] and meter.values == []


def test_stopwatch_is_the_mean_time_of_a_use(monkeypatch):
    clock = iter([1.0, 1.25, 7.0, 7.75])
    monkeypatch.setattr("ignite_engine.handlers.meters.perf_counter", lambda: next(clock))
    trainer = Trainer(lambda engine, batch: None)
    watch = trainer.state.meters["time/augment_ms"] = Stopwatch()

    @trainer.on(Events.ITERATION_STARTED)
    def work():
        with watch:
            pass

    MetricLogger(console=False).attach(trainer, Events.EPOCH_COMPLETED)
    assert trainer.run(range(2)).metrics["time/augment_ms"] == 500.0


@pytest.mark.parametrize("bad", [1, 5, 63, 64, 65, 130, 200, None])
def test_first_that_is_not_finite_is_found_though_iterations_are_left_out(bad):
    running, all_iterations = Running("mean"), [each for each in range(1, 201) if each % 7]
    for iterations in (all_iterations[:5], all_iterations[5:70], all_iterations[70:]):
        running.add(
            [torch.tensor(math.inf if bad is not None and each >= bad else 1e30) for each in iterations], iterations
        )
    assert running.bad_at() == (math.inf if bad is None else bad + (bad % 7 == 0))


def test_what_a_checkpoint_had_comes_before_what_was_given_since():
    before, since = Meter("sum"), Meter("sum")
    for number in range(100):
        before.update(float(number))
    for number in range(100, 300):
        since.update(float(number))
    since.continue_from(before.state_dict())
    assert since.reduced() == (sum(range(300)), 300.0)


def test_not_finite_is_what_it_is():
    meter = Meter("max")
    meter.update(1.0), meter.update(math.nan)
    assert math.isnan(meter.over_ranks([(2.0, 1.0), meter.reduced()]) or 0.0)
    with pytest.raises(ValueError, match="expected 'sum', 'mean', 'max' or 'min'"):
        Meter("median")


@pytest.mark.slow
@pytest.mark.parametrize("die_at", range(1, 12))
@pytest.mark.parametrize("late", [False, True])
def test_resumed_run_has_the_meters_of_the_whole_one(late, die_at, tmp_path):
    """Also of a meter that is made after the resume, by a handler."""

    def run(directory, die_at=None):
        trainer = trainer_of(log_grad_norm=True)

        def make():
            trainer.state.meters["largest"] = Meter("max", of="grad_norm")
            trainer.state.meters["given"] = Meter("sum")

        if late:
            trainer.add_event_handler(Events.ITERATION_STARTED(once=int(trainer.state.iteration) + 1), make)
            trainer.add_event_handler(Events.STARTED, lambda: None if trainer.state.iteration == 0 else make())
        else:
            make()
        MetricLogger(directory, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))

        @trainer.on(Events.ITERATION_STARTED)
        def count():
            trainer.state.meters["given"].update(0.1 * trainer.state.iteration)

        resume_and_run(trainer, directory, die_at, save_every=2)

    run(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "cut", die_at)
    run(tmp_path / "cut")

    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert all({"largest", "given"} <= line.keys() for line in lines(tmp_path / "whole" / "metrics.jsonl"))


def _cases(rank):
    """Rank 1 gives its own meter nothing, and larger values."""
    trainer = Trainer(lambda engine, batch: {"loss": 0.0, "a": float(batch) + 10 * rank})
    of_outputs(trainer)
    trainer.state.meters |= {"given": Meter("mean"), "nothing": Meter("min")}
    MetricLogger(console=False).attach(trainer, Events.EPOCH_COMPLETED)

    @trainer.on(Events.ITERATION_STARTED)
    def give():
        if rank == 0:
            trainer.state.meters["given"].update(float(trainer.state.iteration))

    counts = []
    with Collectives() as collectives:
        before = Events.EPOCH_COMPLETED
        trainer.add_event_handler(before, lambda: counts.append(dict(collectives.counts)))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: collectives.counts.clear())
        state = trainer.run([1, 2, 3], max_epochs=1)
    return {"metrics": dict(state.metrics), "collectives": counts}


@pytest.mark.distributed
def test_on_two_ranks_all_meters_and_means_are_one_collective(tmp_path):
    answers = on_two_ranks(_cases, tmp_path / "store")

    assert answers["collectives"] == [[{"all_gather": 1}]] * 2
    expected = {"loss": 0.0, "a": 7.0, "sum of a": 42.0, "mean of a": 7.0, "max of a": 13.0, "min of a": 1.0}
    assert answers["metrics"] == [expected | {"given": 2.0}] * 2


def test_a_run_that_starts_over_has_nothing_of_the_one_before():
    """Which ended within an interval of the log."""
    trainer, seen = trainer_of(), list[dict[str, float]]()
    meter = trainer.state.meters["given"] = Meter("sum")
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: meter.update(1.0))
    trainer.add_event_handler(
        TrainingEvents.METRICS_READY, lambda: seen.append({"given": trainer.state.metrics["given"]})
    )
    broken = trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(8), max_epochs=1)
    assert seen == [{"given": 2.0}] and meter.count == 1
    broken.remove()
    trainer.run(numbers_loader(8), max_epochs=1)

    assert seen[1:] == [{"given": 2.0}] * 2


def test_numbers_among_tensors_keep_their_digits():
    for values in ([16777217.0, torch.tensor(1.0)], [torch.tensor(1.0), 16777217.0]):
        meter = Meter("sum")
        for value in values:
            meter.update(value)
        assert meter.reduced() == (16777218.0, 2.0)
