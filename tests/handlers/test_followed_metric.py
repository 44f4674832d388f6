"""A followed metric: one value per iteration, the mean over the ranks, and one sentence about a key that is wrong."""

import math
import warnings

import pytest
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents, create_evaluator
from ignite_engine.handlers import Evaluation, MetricLogger
from ignite_engine.handlers.followed_metric import FollowedMetric, improves
from tests.kit.tiny import linear


def writing(values):
    """A trainer with no output that writes ``values[iteration]``."""
    trainer = Trainer(lambda engine, batch: None)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(values.get(trainer.state.iteration, {}))
    )
    return trainer


def follow(trainer, key):
    """The values of ``key`` and the warnings about it in a run of 6 iterations, each with its iteration."""
    followed, found = FollowedMetric(key, f"Thing(metric={key!r})"), list[tuple[int, float]]()

    def read(trainer):
        if (value := followed.new_value(trainer)) is not None:
            found.append((trainer.state.iteration, value))

    trainer.add_event_handler(TrainingEvents.METRICS_READY, read)
    trainer.add_event_handler(Events.COMPLETED, followed.warn_if_never_written)
    warned = list[tuple[int, str]]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def note():
            warned.extend((trainer.state.iteration, str(each.message)) for each in caught)
            caught.clear()

        trainer.add_event_handler(TrainingEvents.RESUME_POINT, note)
        trainer.run(range(6), max_epochs=1)
        warned.extend((-1, str(each.message)) for each in caught)
    return found, warned


def test_each_value_is_read_once():
    found, warned = follow(writing({2: {"a": 1.0}, 3: {"b": 5.0}, 4: {"a": 1.0}}), "a")

    assert found == [(2, 1.0), (4, 1.0)] and warned == []


def test_same_value_is_not_read_again_at_a_later_event_of_its_iteration():
    trainer, followed = writing({}), FollowedMetric("a", "Thing(key='a')")
    trainer.state.metrics["a"] = 2.0

    assert [followed.new_value(trainer), followed.new_value(trainer)] == [2.0, None]


def test_value_of_a_later_iteration_is_of_another_run():
    trainer, followed = writing({}), FollowedMetric("a", "Thing(key='a')")
    followed.seen_at = 3
    trainer.state.iteration = 3
    followed.begin(trainer)
    assert followed.seen_at == 3
    trainer.state.iteration = 0
    followed.begin(trainer)
    assert followed.seen_at is None


def evaluated(trainer, name, iteration):
    evaluator = create_evaluator(linear(), lambda model, batch: batch)
    evaluator.add_event_handler(Events.COMPLETED, lambda: evaluator.state.metrics.update(accuracy=0.5))
    Evaluation(evaluator, [1], name=name).attach(trainer, Events.ITERATION_COMPLETED(once=iteration))


def test_loss_of_the_update_may_be_written_after_that_of_an_evaluation():
    trainer = Trainer(lambda engine, batch: float(batch))
    evaluated(trainer, "val", 2)
    MetricLogger(console=False).attach(trainer, Events.EPOCH_COMPLETED)
    found, warned = follow(trainer, "loss")

    assert found == [(6, 2.5)] and warned == []


@pytest.mark.parametrize(
    ("value", "best", "mode", "min_delta", "better"),
    [
        (1.0, None, "min", 0.0, True),
        (math.nan, None, "min", 0.0, False),
        (math.inf, 1.0, "max", 0.0, False),
        (0.9, 1.0, "min", 0.0, True),
        (0.9, 1.0, "min", 0.1, False),
        (0.5, 1.0, "min", 0.25, True),
        (1.1, 1.0, "max", 0.0, True),
        (1.0, 1.0, "max", 0.0, False),
    ],
)
def test_improvement_is_finite_and_larger_than_min_delta(value, best, mode, min_delta, better):
    assert improves(value, best, mode, min_delta) is better
