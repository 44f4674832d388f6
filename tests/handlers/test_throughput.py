"""Rates count what the update consumed, over the time that iterations took and nothing else."""

import time
from collections import defaultdict

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update
from ignite_engine.engine.bus import handlers_of
from ignite_engine.events import TrainingEvents
from ignite_engine.handlers.throughput import Throughput
from tests.ranks.forkserver import on_ranks

COMPUTE_S, WAIT_S, ELSEWHERE_S, STEP_S = 0.02, 0.01, 0.1, 0.005
SLACK_S = (
    0.04  # what a busy machine may add to an epoch outside of the sleeps; well below the differences that are tested
)


class Slept:
    """Sleeps for something, and knows for how long it really did."""

    def __init__(self):
        self.seconds = defaultdict(float)

    def __call__(self, what, seconds):
        started = time.perf_counter()
        time.sleep(seconds)
        self.seconds[what] += time.perf_counter() - started


class SlowStep(torch.optim.SGD):
    def step(self, closure=None):
        self.slept("step", STEP_S)
        return super().step(closure)

    slept = Slept()


class SlowData:
    """Batches of 4 samples of 3 tokens, the last of an epoch of 2; each takes a while to come."""

    def __init__(self, count, slept=None):
        self.count = count
        self.slept = slept or Slept()

    def __len__(self):
        return self.count

    def __iter__(self):
        for index in range(self.count):
            self.slept("wait", WAIT_S)
            yield {"length": 3, "inputs": [torch.ones(2 if index == self.count - 1 else 4, 3)]}


def slow_trainer(accumulation_steps=None, slept=None):
    model = nn.Linear(3, 1)
    sleep = slept or Slept()

    def loss_fn(model, batch):
        sleep("compute", COMPUTE_S)
        loss = model(batch["inputs"][0]).pow(2).mean()
        return loss

    optimizer = SlowStep(model.parameters(), lr=0.1)
    optimizer.slept = sleep
    return Trainer(Update(model, optimizer, loss_fn), accumulation_steps)


def published(trainer):
    seen = []
    trainer.add_event_handler(
        TrainingEvents.METRICS_READY, lambda trainer: seen.append(dict(trainer.state.metrics.fresh))
    )
    return seen


def count_tokens(batch):
    return int(batch["inputs"][0].numel())


def test_samples_and_tokens_are_those_of_the_micro_batches():
    slept = Slept()
    trainer = slow_trainer(accumulation_steps=2, slept=slept)
    slow_trainer().run(SlowData(2), max_epochs=1)  # what is slow once in a process
    seen = published(trainer)
    Throughput(count_tokens).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(SlowData(5, slept), max_epochs=1)  # 3 iterations of 2, 2 and 1 micro-batches: 18 samples, 54 tokens
    (values,) = seen
    seconds = 18 / values["throughput/samples_per_s"]
    assert set(values) == {"throughput/samples_per_s", "throughput/tokens_per_s"}
    assert values["throughput/tokens_per_s"] * seconds == pytest.approx(54, rel=1e-12)
    assert sum(slept.seconds.values()) <= seconds < sum(slept.seconds.values()) + SLACK_S


@pytest.mark.row("F6")
@pytest.mark.parametrize("update", ["ours", "the user's"])
def test_evaluations_and_handlers_between_iterations_are_in_no_rate(update):
    trainer = slow_trainer() if update == "ours" else Trainer(lambda engine, batch: time.sleep(COMPUTE_S))
    seen = published(trainer)

    def evaluate(trainer):
        trainer.fire_event(TrainingEvents.EVALUATION_STARTED)
        time.sleep(ELSEWHERE_S)
        trainer.fire_event(TrainingEvents.EVALUATION_COMPLETED)

    evaluate.phase = 0
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), evaluate)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: time.sleep(ELSEWHERE_S))  # a checkpoint
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: time.sleep(ELSEWHERE_S))
    Throughput().attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(SlowData(4), max_epochs=1)
    seconds = 14 / seen[0]["throughput/samples_per_s"]
    assert seconds < 4 * (COMPUTE_S + WAIT_S + STEP_S) + 2 * SLACK_S  # and not 1 s more


def test_every_interval_starts_at_zero_and_an_event_without_iterations_writes_nothing():
    trainer = slow_trainer()
    seen = published(trainer)
    throughput = Throughput(lambda batch: 1)
    throughput.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(Events.COMPLETED, throughput)  # just after the last interval was written
    trainer.run(SlowData(4), max_epochs=1)
    ratios = [values["throughput/samples_per_s"] / values["throughput/tokens_per_s"] for values in seen]
    assert len(seen) == 2 and ratios == pytest.approx([8 / 2, 6 / 2])


def test_without_tokens_and_without_arrays_these_rates_are_left_out():
    trainer = Trainer(lambda engine, batch: None)
    seen = published(trainer)
    Throughput().attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(["a", "b"], max_epochs=1)
    assert set(seen[0]) == {"throughput/steps_per_s"}


def test_samples_can_be_counted_by_the_user():
    trainer = Trainer(lambda engine, batch: None)
    seen = published(trainer)
    Throughput(lambda batch: 1, samples_fn=len).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(["abc", "de"], max_epochs=1)
    assert seen[0]["throughput/samples_per_s"] / seen[0]["throughput/tokens_per_s"] == pytest.approx(2.5)


def test_it_does_not_listen_to_backward_and_saves_nothing():
    trainer = slow_trainer()
    saved = set(trainer.registry.objects)
    Throughput(count_tokens).attach(trainer)
    assert not handlers_of(trainer, TrainingEvents.BACKWARD_COMPLETED)
    assert set(trainer.registry.objects) == saved


def test_nothing_is_written_between_its_events():
    trainer = slow_trainer()
    seen = published(trainer)
    Throughput().attach(trainer, Events.ITERATION_COMPLETED(every=3))
    trainer.run(SlowData(5), max_epochs=1)
    assert len(seen) == 1


def _one_of_two_ranks(rank, folder):
    slept = Slept()
    # rank 1 is the slow one, and ends first: of its second group one micro-batch is a repetition with weight zero
    trainer = Trainer(lambda engine, batch: slept("compute", 0.02 + 0.2 * rank), accumulation_steps=2)
    seen = published(trainer)
    Throughput(lambda batch: 10).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run([torch.ones(4 + 2 * rank, 1)] * (4 - rank), max_epochs=1)
    assert trainer.state.padding == rank
    torch.save(seen, f"{folder}/{rank}.pt")


@pytest.mark.row("F6")
@pytest.mark.distributed
def test_on_two_ranks_work_is_summed_over_the_time_of_the_slower(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first == second
    values = first[0]
    assert 34 / values["throughput/samples_per_s"] == pytest.approx(0.44, abs=0.2)  # without rank 1 it is 0.04 s
    assert values["throughput/tokens_per_s"] / values["throughput/samples_per_s"] == pytest.approx(70 / 34)
