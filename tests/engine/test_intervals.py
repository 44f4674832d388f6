"""An interval is an event: it comes where it says, on all ranks at once, and at the same places after a resume."""

import time

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, TrainingEvents, create_evaluator, every, loader
from ignite_engine.engine.saved_progress import counters
from ignite_engine.handlers import Checkpoint, Evaluation, MetricLogger
from tests.kit.tiny import Numbers, linear, numbers_loader, on_two_ranks, trainer_of


def seen_at(trainer, **interval):
    """The iterations at which the interval comes, from now on."""
    seen = []
    trainer.add_event_handler(every(**interval), lambda: seen.append(trainer.state.iteration))
    return seen


def tokens_of(batch):
    """Between 1 and 5 of each sample, by its values."""
    return int((batch[0][:, 0].abs() * 2).long().clamp(1, 5).sum())


@pytest.mark.parametrize(
    ("part", "length", "places"),
    [
        (0.25, 8, [2, 4, 6, 8]),
        (0.25, 10, [3, 5, 8, 10]),
        (1 / 3, 7, [3, 5, 7]),
        (0.3333, 7, [3, 5, 7]),
        (0.5, 3, [2, 3]),
        (0.1, 3, [1, 2, 3]),  # more parts than iterations: each of them
        (0.01, 1, [1]),
    ],
)
def test_each_epoch_has_as_many_parts_and_the_last_is_its_end(part, length, places):
    trainer = trainer_of()
    event = every(epochs=part)
    seen = []
    trainer.add_event_handler(event, lambda: seen.append(trainer.state.iteration))
    trainer.run(numbers_loader(2 * length), max_epochs=3)
    assert seen == [epoch * length + place for epoch in range(3) for place in places]


def test_whole_units_are_ignites_own_filters():
    for event, expected in (
        (every(iterations=3), Events.ITERATION_COMPLETED),
        (every(epochs=2), Events.EPOCH_COMPLETED),
        (every(windows=1), TrainingEvents.WINDOW_COMPLETED),
    ):
        assert event == expected
    trainer = trainer_of()
    assert seen_at(trainer, iterations=3) == [] == seen_at(trainer, epochs=2)
    both = []
    trainer.add_event_handler(every(epochs=1.5) | every(epochs=2), lambda: both.append(trainer.state.iteration))
    trainer.run(numbers_loader(8), max_epochs=6)  # of four iterations
    assert both == [6, 8, 12, 16, 18, 24, 24]


@pytest.mark.parametrize("accumulation_steps", [None, 2])
def test_samples_and_tokens_of_whole_iterations(accumulation_steps):
    """11 samples in batches of 2: the last of a pass has one."""
    trainer = trainer_of(accumulation_steps=accumulation_steps, weight_fn=tokens_of)
    samples, tokens, own = (
        seen_at(trainer, samples=5),
        seen_at(trainer, tokens=9),
        seen_at(trainer, tokens=1, count=tokens_of),
    )
    totals = [(0, 0)]
    counts = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def count():
        batches = [trainer.state.batch] if accumulation_steps is None else trainer.state.batch
        counts.append((sum(len(each[0]) for each in batches), sum(map(tokens_of, batches))))
        totals.append((totals[-1][0] + counts[-1][0], totals[-1][1] + counts[-1][1]))

    trainer.run(numbers_loader(11, shuffle=True), max_epochs=3)
    assert (trainer.state.samples, trainer.state.tokens) == totals[-1] and totals[-1][0] == 33
    for seen, unit, number in ((samples, 0, 5), (tokens, 1, 9)):
        reached = [at for at in range(1, len(totals)) if totals[at][unit] // number > totals[at - 1][unit] // number]
        assert seen == reached and len(seen) > 2
    assert own == list(range(1, len(totals)))


def test_what_no_interval_needs_is_not_counted():
    trainer = trainer_of()
    handlers = sum(map(len, trainer._event_handlers.values()))
    every(samples=5), every(seconds=1)
    seen_at(trainer, epochs=0.5), seen_at(trainer, iterations=2)
    assert sum(map(len, trainer._event_handlers.values())) == handlers + 2
    assert trainer.run(numbers_loader(), max_epochs=1).samples is None
    assert not {"samples", "tokens"} & set(counters(trainer.progress))


def test_one_event_serves_several_handlers_and_trainers():
    event, seen = every(samples=4), list[tuple[str, int]]()
    trainers = trainer_of(), trainer_of()
    for name, trainer in zip("ab", trainers, strict=True):
        for place in (1, 2):
            trainer.add_event_handler(
                event, lambda engine, name: seen.append((name, engine.state.iteration)), f"{name}{place}"
            )
    trainers[0].run(numbers_loader(8, batch_size=2), max_iters=3)
    trainers[1].run(numbers_loader(8, batch_size=4), max_iters=2)
    assert seen == [("a1", 2), ("a2", 2), ("b1", 1), ("b2", 1), ("b1", 2), ("b2", 2)]
    trainers[1].run(numbers_loader(8, batch_size=4), max_iters=2)  # starts over
    assert seen[6:] == seen[2:6] and trainers[1].state.samples == 8


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_a_resumed_run_has_the_places_of_the_whole_one(tmp_path, stop_at):
    def run_of(folder):
        trainer, checkpoint = trainer_of(), Checkpoint(folder)
        seen = [seen_at(trainer, epochs=0.4), seen_at(trainer, samples=7), seen_at(trainer, tokens=11, count=tokens_of)]
        checkpoint.attach(trainer, Events.COMPLETED)
        return trainer, seen, checkpoint

    whole, expected, _ = run_of(tmp_path / "whole")
    whole.run(numbers_loader(11, shuffle=True), max_epochs=2)
    first, before, _ = run_of(tmp_path / "run")
    first.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: first.request_stop("here"))
    first.run(numbers_loader(11, shuffle=True), max_epochs=2)
    second, after, checkpoint = run_of(tmp_path / "run")
    checkpoint.resume()
    second.run(numbers_loader(11, shuffle=True), max_epochs=2)
    assert [one + two for one, two in zip(before, after, strict=True)] == expected
    assert (second.state.samples, second.state.tokens) == (whole.state.samples, whole.state.tokens)


def test_clocks_come_as_often_as_they_say():
    trainer = trainer_of()
    seen, minutes = seen_at(trainer, seconds=0.05), seen_at(trainer, minutes=1)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: time.sleep(0.02))
    began = time.monotonic()
    trainer.run(numbers_loader(), max_iters=12)
    assert 2 <= len(seen) <= (time.monotonic() - began) / 0.05 and minutes == []


def test_clocks_start_with_the_run():
    trainer = trainer_of()
    seen = seen_at(trainer, seconds=0.5)
    time.sleep(0.5)
    trainer.run(numbers_loader(), max_iters=3)
    assert seen == []


class Unreadable(Numbers):
    def __getitem__(self, index):
        if index == 3:
            raise OSError("not readable")
        return super().__getitem__(index)


def test_what_cannot_be_read_hides_no_part_of_an_epoch():
    """Of five batches the second is left out, with which the first part would have ended."""
    trainer = Trainer(trainer_of().update, max_read_errors=1)
    seen = seen_at(trainer, epochs=0.4)
    trainer.run(loader(Unreadable(10), 2), max_epochs=1)
    assert seen == [2, 3] and trainer.state.iteration == 4


def test_any_handler_takes_it(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path, keep_last=9).attach(trainer, every(samples=6))
    MetricLogger(console=False).attach(trainer, every(epochs=0.5))
    evaluated = []
    look = create_evaluator(linear(), lambda model, batch: evaluated.append(trainer.state.iteration), {})
    Evaluation(look, numbers_loader(2)).attach(trainer, every(samples=4))  # before the handlers of other phases
    trainer.run(numbers_loader(12), max_epochs=1)
    assert sorted(each.name[-2:] for each in tmp_path.glob("iteration*")) == ["03", "06"]
    assert evaluated == [2, 4, 6]
    described = trainer.describe()
    assert "MetricLogger (event_filter=every(epochs=0.5))" in described


def on_a_rank(folder, rank):
    """Rank 1 is slower; its clock never decides."""
    answers = {}
    for name, ends in (("whole", [99]), ("cut", [3, 99])):
        seen = [[], [], []]
        for stop_at in ends:
            model = nn.parallel.DistributedDataParallel(linear())
            trainer, checkpoint = trainer_of(model, weight_fn=tokens_of), Checkpoint(folder / name)
            found = [seen_at(trainer, samples=7), seen_at(trainer, tokens=13), seen_at(trainer, epochs=0.25)]
            checkpoint.attach(trainer, Events.COMPLETED)
            checkpoint.resume()
            stops = Events.ITERATION_COMPLETED(once=stop_at)
            trainer.add_event_handler(stops, lambda engine: engine.request_stop("here"))
            trainer.add_event_handler(stops, trainer.vote_at_next_boundary)
            trainer.run(numbers_loader(21, shuffle=True), max_epochs=2)  # rank 0 has 11, rank 1 has 10
            for each, new in zip(seen, found, strict=True):
                each += new
        answers[name] = seen
        answers[f"{name} totals"] = [trainer.state.samples, trainer.state.tokens]
    trainer = trainer_of(nn.parallel.DistributedDataParallel(linear()))
    clock = seen_at(trainer, seconds=0.1 if rank == 0 else 0.0001)
    second = seen_at(trainer, seconds=0.15)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: time.sleep(0.01 + 0.01 * rank))
    trainer.run(numbers_loader(80, batch_size=1), max_epochs=2)
    return answers | {"clock": clock, "second": second, "torch": torch.get_num_threads()}


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_agree_and_resume_at_the_same_places(tmp_path):
    answers = on_two_ranks(lambda rank: on_a_rank(tmp_path, rank), tmp_path / "store")
    for name, (first, second) in answers.items():
        assert first == second, name
    samples, tokens, parts = answers["whole"][0]
    assert answers["cut"] == answers["whole"] and answers["cut totals"] == answers["whole totals"]
    assert answers["whole totals"][0][0] == 42
    # an iteration has 4 samples, the sixth of an epoch has 1
    assert samples == [2, 4, 6, 8, 10, 12] and len(tokens) > 3
    assert parts == [2, 3, 5, 6, 8, 9, 11, 12]
    assert 2 <= len(answers["clock"][0]) <= 30 and answers["second"][0]
