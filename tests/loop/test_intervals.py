"""An interval is an event: it comes where it says, on all ranks at once, and at the same places after a resume."""

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, TrainingEvents, create_evaluator, every, loader
from ignite_engine.handlers import Checkpoint, Evaluation, MetricLogger
from tests.kit.processes import ranks
from tests.kit.resume import EVERYWHERE, PLACES, assert_resumes, program
from tests.kit.seen import Seen
from tests.kit.tiny import Numbers, linear, numbers_loader, trainer_of


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
        (0.5, 3, [2, 3]),
        (0.1, 3, [1, 2, 3]),  # more parts than iterations: each of them
        (0.01, 1, [1]),
    ],
)
def test_each_epoch_has_as_many_parts_and_the_last_is_its_end(part, length, places):
    trainer = trainer_of()
    seen = seen_at(trainer, epochs=part)
    trainer.run(numbers_loader(2 * length), max_epochs=3)
    assert seen == [epoch * length + place for epoch in range(3) for place in places]


def test_whole_units_are_ignites_own_filters():
    for event, expected in (
        (every(iterations=3), Events.ITERATION_COMPLETED),
        (every(epochs=2), Events.EPOCH_COMPLETED),
        (every(windows=1), TrainingEvents.WINDOW_COMPLETED),
    ):
        assert event == expected
    trainer, both = trainer_of(), []
    trainer.add_event_handler(every(epochs=1.5) | every(epochs=2), lambda: both.append(trainer.state.iteration))
    trainer.run(numbers_loader(8), max_epochs=6)  # of four iterations
    assert both == [6, 8, 12, 16, 18, 24, 24]


@pytest.mark.parametrize("accumulation_steps", [None, 2])
def test_samples_and_tokens_of_whole_iterations(accumulation_steps):
    """11 samples in batches of 2: the last of a pass has one."""
    trainer = trainer_of(accumulation_steps=accumulation_steps, weight_fn=tokens_of)
    intervals = [{"samples": 5}, {"tokens": 9}, {"tokens": 1, "count": tokens_of}]
    samples, tokens, own = (seen_at(trainer, **each) for each in intervals)
    totals = [(0, 0)]

    @trainer.on(Events.ITERATION_COMPLETED)
    def count():
        batches = [trainer.state.batch] if accumulation_steps is None else trainer.state.batch
        of_iteration = sum(len(each[0]) for each in batches), sum(map(tokens_of, batches))
        totals.append(tuple(map(sum, zip(totals[-1], of_iteration, strict=True))))

    trainer.run(numbers_loader(11, shuffle=True), max_epochs=3)
    assert (trainer.state.samples, trainer.state.tokens) == totals[-1] and totals[-1][0] == 33
    for seen, unit, number in ((samples, 0, 5), (tokens, 1, 9)):
        reached = [at for at in range(1, len(totals)) if totals[at][unit] // number > totals[at - 1][unit] // number]
        assert seen == reached and len(seen) > 2
    assert own == list(range(1, len(totals)))


@pytest.mark.parametrize("narrow", [np.int32, lambda number: torch.tensor(number, dtype=torch.int32)])
def test_counts_of_narrow_integers_are_exact(narrow):
    large = 2**31 - 1
    trainer = Trainer(lambda engine, batch: None, accumulation_steps=2)
    seen = seen_at(trainer, tokens=4 * large, count=lambda batch: narrow(large))
    trainer.run(range(8))
    assert trainer.state.tokens == 8 * large and seen == [2, 4]


INTERVALS = ({"epochs": 0.4}, {"samples": 7}, {"tokens": 11, "count": tokens_of})


@pytest.mark.parametrize(
    ("how", "at"),
    [
        *(("stop", PLACES), ("same process", PLACES)),
        pytest.param("stop", EVERYWHERE, marks=pytest.mark.nightly),
    ],
    ids=["stop", "same process", "stop anywhere"],
)
def test_a_resumed_run_has_the_places_of_the_whole_one(how, at, tmp_path):
    """What is counted is saved, and so are the lines of each."""
    handlers = [
        lambda each=each: (Seen(lambda trainer: "due", name=next(iter(each))), every(**each)) for each in INTERVALS
    ]

    def attach(trainer):
        for make in handlers:
            seen, event = make()
            seen.attach(trainer, event)

    made = program([attach], data=lambda: numbers_loader(11, shuffle=True), limits={"max_epochs": 2})
    assert_resumes(made, tmp_path, at=at, how=[how])


def test_clocks_come_as_often_as_they_say_and_start_with_the_run(clock):
    trainer = trainer_of()
    seen, minutes = seen_at(trainer, seconds=0.5), seen_at(trainer, minutes=1)
    clock.move(100)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: clock.move(0.2))
    trainer.run(numbers_loader(24, 2), max_iters=12)
    assert seen == [3, 6, 9, 12] and minutes == []


class Unreadable(Numbers):
    def __getitem__(self, index):
        if index == 3:
            raise OSError("not readable")
        return super().__getitem__(index)


def test_what_cannot_be_read_hides_no_part_of_an_epoch():
    """Of five batches the second is left out: the iterations that there are count."""
    trainer = Trainer(trainer_of().update, max_read_errors=1)
    seen = seen_at(trainer, epochs=0.4)
    trainer.run(loader(Unreadable(10), 2), max_epochs=1)
    assert seen == [2, 4] and trainer.state.iteration == 4


def test_any_handler_takes_it(tmp_path):
    trainer, evaluated = trainer_of(), []
    Checkpoint(tmp_path, keep_last=9).attach(trainer, every(samples=6))
    MetricLogger(console=False).attach(trainer, every(epochs=0.5))
    look = create_evaluator(linear(), lambda model, batch: evaluated.append(trainer.state.iteration), {})
    Evaluation(look, numbers_loader(2)).attach(trainer, every(samples=4))  # before the handlers of other phases
    trainer.run(numbers_loader(12), max_epochs=1)
    assert sorted(each.name[-2:] for each in tmp_path.glob("iteration*")) == ["03", "06"]
    assert evaluated == [2, 4, 6]
    assert "MetricLogger (event_filter=every(epochs=0.5))" in trainer.describe()


def on_a_rank(rank, folder):
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
            trainer.run(numbers_loader(21, shuffle=True), max_epochs=2)  # rank 0 has 11, rank 1 has 10
            for each, new in zip(seen, found, strict=True):
                each += new
        answers[name] = seen, trainer.state.samples, trainer.state.tokens
    return answers


def test_two_ranks_agree_and_resume_at_the_same_places(tmp_path):
    first, second = ranks(2, on_a_rank, tmp_path)
    assert first == second and first["cut"] == first["whole"]
    (samples, tokens, parts), count, _ = first["whole"]
    # an iteration has 4 samples, the sixth of an epoch has 1
    assert count == 42 and samples == [2, 4, 6, 8, 10, 12] and len(tokens) > 3
    assert parts == [2, 3, 5, 6, 8, 9, 11, 12]


def clocks_on_a_rank(rank):
    """Rank 1 asks for another pace; its clock never decides."""
    trainer = trainer_of(nn.parallel.DistributedDataParallel(linear()))
    seen = seen_at(trainer, seconds=0.01 if rank == 0 else 0.0001)
    trainer.run(numbers_loader(160, batch_size=1), max_epochs=1)
    return seen


def test_two_ranks_have_one_clock():
    first, second = ranks(2, clocks_on_a_rank)
    assert first == second and len(first) < 80


def test_a_handler_that_is_refused_counts_nothing():
    trainer = trainer_of()
    with pytest.raises(ValueError):
        trainer.add_event_handler(every(samples=4, count=lambda batch: 1 / 0), lambda one, two: None)  # of no such form
    assert trainer.run(numbers_loader(8)).samples is None
