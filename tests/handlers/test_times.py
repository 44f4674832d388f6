"""Where the time of an iteration goes, and how much is trained in a second, by a clock that stands still elsewhere."""

import pytest
import torch
from ignite.engine import Events

import ignite_engine
from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, loader
from ignite_engine.handlers import Evaluation, MetricLogger, StepTimes, Throughput
from tests.kit.clock import still_clock
from tests.kit.floors import of
from tests.kit.processes import ranks
from tests.kit.tiny import Numbers, linear, mse, trainer_of

DATA_S, FORWARD_S, BACKWARD_S, OPTIMIZER_S, ELSEWHERE_S = 0.001, 0.01, 0.02, 0.03, 7.0
STEP_S = 4 * DATA_S + 2 * FORWARD_S + 2 * BACKWARD_S + OPTIMIZER_S


class SlowData(Numbers):
    def __init__(self, clock, count):
        super().__init__(count)
        self.clock = clock

    def __getitem__(self, index):
        self.clock.move(DATA_S)
        return super().__getitem__(index)


def slow_trainer(clock):
    """Every part of a step takes its time, of 2 micro-batches of 2 samples."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        clock.move(FORWARD_S)
        return mse(model, batch)

    next(model.parameters()).register_hook(lambda gradient: clock.move(BACKWARD_S))
    optimizer.register_step_pre_hook(lambda *_: clock.move(OPTIMIZER_S))
    return Trainer(Update(model, optimizer, loss_fn), accumulation_steps=2)


def busy_elsewhere(trainer, clock):
    """Once an epoch an evaluation, a log point, and handlers of events between iterations."""
    evaluator = create_evaluator(trainer.update.model, lambda model, batch: clock.move(ELSEWHERE_S))
    Evaluation(evaluator, loader(Numbers(4), batch_size=4)).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    every_2 = Events.ITERATION_COMPLETED(every=2), TrainingEvents.RESUME_POINT(every=2)
    for event in (*every_2, TrainingEvents.METRICS_READY):
        trainer.add_event_handler(event, lambda: clock.move(ELSEWHERE_S))


def published(trainer, start):
    """What is written at each log point, by names that begin so."""
    seen = []

    def note():
        if found := {key: value for key, value in trainer.state.metrics.fresh.items() if key.startswith(start)}:
            seen.append(found)

    trainer.add_event_handler(TrainingEvents.METRICS_READY, note)
    return seen


# -- the parts of a step -----------------------------------------------------------------------------------------------


@pytest.mark.row("F5")
def test_each_part_has_the_time_that_was_spent_in_it(clock):
    trainer = slow_trainer(clock)
    busy_elsewhere(trainer, clock)
    StepTimes().attach(trainer, Events.ITERATION_COMPLETED(every=3))
    seen = published(trainer, "time/")
    trainer.run(loader(SlowData(clock, 12), batch_size=2), max_epochs=2)  # 3 iterations an epoch

    step = {
        "time/step_ms": 1e3 * STEP_S,
        "time/data_wait_ms": 4e3 * DATA_S,
        "time/forward_ms": 2e3 * FORWARD_S,
        "time/backward_ms": 2e3 * BACKWARD_S,
        "time/optimizer_ms": 1e3 * OPTIMIZER_S,
    }
    # between iterations: after the 2nd; after the 4th, and the line of the 3rd
    other = [{"time/other_ms": 1e3 * times * ELSEWHERE_S / 3} for times in (4, 5)]
    assert seen == [pytest.approx({**step, **each}, abs=1e-3) for each in other]


def test_own_update_is_known_as_a_whole(clock):
    trainer = Trainer(lambda engine, batch: clock.move(0.004))
    StepTimes().attach(trainer, Events.ITERATION_COMPLETED(every=5))
    trainer.run([torch.ones(1)] * 10, max_epochs=1)

    assert dict(trainer.state.metrics) == {"time/step_ms": pytest.approx(4.0, abs=1e-3)}


@pytest.mark.parametrize("kind", ["a stream of unknown length", *of("windows", ["windows"])])
def test_it_waits_for_data_to_their_end(kind, clock):
    def stream():
        for number in range(3):
            clock.move(0.004)
            yield number if kind == "windows" else (torch.ones(2, 3), torch.ones(2, 1))
        clock.move(0.004)  # it knows only then that it was the last one

    class Stream:
        def __iter__(self):
            return stream()

    data = Stream()
    if kind == "windows":
        data = ignite_engine.Windows(stream(), lambda _: loader(Numbers(2), batch_size=2))
    trainer = trainer_of()
    StepTimes().attach(trainer, Events.EPOCH_COMPLETED)
    state = trainer.run(data, max_epochs=1)

    assert state.iteration == 3 and state.metrics["time/data_wait_ms"] == pytest.approx(4 * 4.0 / 3, abs=1e-3)


def test_second_run_and_two_trainers_keep_their_own_time(clock):
    one, two = (Trainer(lambda engine, batch, s=s: clock.move(s)) for s in (0.001, 0.002))
    for trainer in (one, two):
        StepTimes().attach(trainer, Events.ITERATION_COMPLETED(every=2))
    one.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: two.run(range(4)))
    seen = published(one, "time/step"), published(two, "time/step")
    one.run(range(4))
    clock.move(60)
    one.run(range(4), max_epochs=2)

    for each, milliseconds in zip(seen, (1.0, 2.0), strict=True):
        assert all(values == {"time/step_ms": pytest.approx(milliseconds, abs=1e-3)} for values in each) and each


def on_a_clock(work):
    """On two ranks, each with a clock of its own."""

    def on_rank(rank):
        with still_clock() as clock:
            return work(rank, clock)

    return ranks(2, on_rank)


def test_times_are_means_over_the_ranks():
    def work(rank, clock):
        trainer = Trainer(lambda engine, batch: clock.move(0.01 + 0.02 * rank))
        StepTimes().attach(trainer, Events.ITERATION_COMPLETED(every=4))
        return dict(trainer.run([torch.ones(1)] * 4, max_epochs=1).metrics)

    assert on_a_clock(work) == [{"time/step_ms": pytest.approx(20.0, abs=1e-3)}] * 2


# -- rates -------------------------------------------------------------------------------------------------------------


def tokens(batch):
    return batch[0].numel()


@pytest.mark.row("F6")
def test_rates_are_of_the_micro_batches_in_the_time_of_iterations_alone(clock):
    trainer = slow_trainer(clock)
    busy_elsewhere(trainer, clock)
    Throughput(tokens).attach(trainer, Events.EPOCH_COMPLETED)
    seen = published(trainer, "throughput/")
    trainer.run(loader(SlowData(clock, 9), batch_size=2), max_epochs=1)  # 3 iterations, of 4, 4 and 1 samples

    seconds = 9 * DATA_S + 5 * (FORWARD_S + BACKWARD_S) + 3 * OPTIMIZER_S
    rates = {"throughput/samples_per_s": 9 / seconds, "throughput/tokens_per_s": 27 / seconds}
    assert seen == [pytest.approx(rates, rel=1e-4)]


def test_every_interval_starts_at_zero_and_an_event_without_iterations_writes_nothing(clock):
    trainer, throughput = Trainer(lambda engine, batch: clock.move(float(batch.sum()))), Throughput(lambda batch: 10)
    seen = published(trainer, "throughput/")
    throughput.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(Events.COMPLETED, throughput)  # just after the last interval was written
    trainer.run([torch.ones(4), torch.ones(4), torch.ones(4), torch.ones(2)], max_epochs=1)

    rates = [{"throughput/samples_per_s": 1.0, "throughput/tokens_per_s": 20 / seconds} for seconds in (8, 6)]
    assert seen == [pytest.approx(each) for each in rates]


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, {"steps": 0.5}),  # of words no samples can be counted
        ({"samples_fn": len}, {"samples": 1.25}),
        ({"samples_fn": len, "tokens_fn": lambda batch: 1}, {"samples": 1.25, "tokens": 0.5}),
    ],
)
def test_rates_that_cannot_be_counted_are_left_out(options, rates, clock):
    trainer = Trainer(lambda engine, batch: clock.move(2.0))
    Throughput(**options).attach(trainer, Events.EPOCH_COMPLETED)
    metrics = trainer.run(["abc", "de"], max_epochs=1).metrics

    assert metrics == {f"throughput/{name}_per_s": pytest.approx(value) for name, value in rates.items()}


@pytest.mark.row("F6")
def test_on_two_ranks_work_is_summed_over_the_time_of_the_slower():
    def work(rank, clock):
        # rank 1 is the slow one, and ends first: of its second group one micro-batch is a repetition with weight zero
        trainer = Trainer(lambda engine, batch: clock.move(0.02 + 0.2 * rank), accumulation_steps=2)
        seen = published(trainer, "throughput/")
        Throughput(lambda batch: 10).attach(trainer, Events.EPOCH_COMPLETED)
        trainer.run([torch.ones(4 + 2 * rank, 1)] * (4 - rank), max_epochs=1)
        return seen

    rates = {"throughput/samples_per_s": 34 / 0.44, "throughput/tokens_per_s": 70 / 0.44}
    assert on_a_clock(work) == [[pytest.approx(rates, rel=1e-4)]] * 2
