"""What Ignite promises of an engine and the Trainer does by its own code: the same calls, the same outcome."""

from typing import Any

import pytest
from ignite.engine import Engine, EventEnum, Events

from ignite_engine import Trainer, TrainingEvents
from tests.kit.tiny import events_of


def constant(engine, batch):
    return 1.0


KINDS = pytest.mark.parametrize("kind", [Engine, Trainer], ids=lambda kind: kind.__name__)
"""Ignite's own engine is the reference: a test that it fails tests something else than Ignite's behaviour."""


# -- data --------------------------------------------------------------------------------------------------------------


def counted(count):
    yield from range(count)


# -- stops and errors --------------------------------------------------------------------------------------------------


# -- the bus -----------------------------------------------------------------------------------------------------------


class Custom(EventEnum):
    STEP = "step"
    OTHER = "other"


@KINDS
def test_custom_events_fire_with_and_without_a_counter(kind):
    heard = []

    def update(engine, batch):
        engine.state.steps = batch
        engine.fire_event(Custom.STEP)
        engine.fire_event(Custom.OTHER)
        engine.fire_event("by name")

    engine = kind(update)
    engine.register_events(*Custom, "by name", event_to_attr={Custom.STEP: "steps"})
    engine.add_event_handler(Custom.STEP(every=2), lambda: heard.append(("every", engine.state.steps)))
    engine.add_event_handler(Custom.OTHER | Events.COMPLETED, lambda: heard.append(("other", engine.state.steps)))
    engine.add_event_handler("by name", lambda word: heard.append((word, engine.state.steps)), "name")
    engine.run([1, 2, 3])

    assert engine.has_registered_events(Custom.STEP)
    assert heard == [
        *[("other", 1), ("name", 1)],
        *[("every", 2), ("other", 2), ("name", 2)],
        *[("other", 3), ("name", 3), ("other", 3)],
    ]
    with pytest.raises(TypeError, match="should be a str or EventEnum"):
        engine.register_events(1)
    with pytest.raises(ValueError, match="is not a valid event"):
        engine.add_event_handler("unknown", lambda: None)


# -- where a run stands ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["assigned", "joined", "updated", "set"])
def test_metrics_are_new_in_whatever_way_they_are_written(way):
    trainer, published = Trainer(constant), list[dict[str, Any]]()

    def write():
        if way == "assigned":  # Ignite's is a plain dict, so users do
            trainer.state.metrics = {"new": 1.0}
        elif way == "joined":
            trainer.state.metrics |= {"new": 1.0}
        elif way == "updated":
            trainer.state.metrics.update(new=1.0)
        else:
            trainer.state.metrics.setdefault("new", 1.0)

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), write)
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: published.append(trainer.state.metrics.fresh))
    state = trainer.run([1, 2, 3])

    assert published == [{"new": 1.0}] and state.metrics == {"new": 1.0}


@pytest.mark.row("A4")
@pytest.mark.parametrize(
    "event",
    [
        Events.EPOCH_STARTED(event_filter=lambda engine, epoch: engine.state.iteration == 3),
        Events.EPOCH_COMPLETED(once=2),
        Events.GET_BATCH_STARTED(once=5),
        Events.GET_BATCH_COMPLETED(once=5),
        Events.ITERATION_STARTED(once=5),
        Events.ITERATION_COMPLETED(once=5),
        Events.ITERATION_COMPLETED(once=6),
    ],
    ids=lambda event: event.name,
)
def test_interrupt_at_any_event_pauses_at_the_step_boundary_that_follows(event):
    def runs_of(interrupts):
        trainer, batches = Trainer(lambda engine, batch: batches.append(batch)), list[int]()
        seen = events_of(trainer)
        if interrupts:
            trainer.add_event_handler(event, trainer.interrupt)
            trainer.run([1, 2, 3], max_epochs=4)
        at = len(seen)
        trainer.run([1, 2, 3], max_epochs=4)
        return seen, batches, at

    seen, batches, at = runs_of(True)
    whole, all_batches, _ = runs_of(False)
    again = [("STARTED", seen[at - 1][1], seen[at - 1][2])]  # and no EPOCH_STARTED for an epoch that has begun

    assert [entry for entry in seen[: at - 1] + seen[at + len(again) :]] == whole
    assert seen[at - 1][0] == "INTERRUPT" and seen[at - 2][0] in ("ITERATION_COMPLETED", "EPOCH_COMPLETED")
    assert seen[at : at + len(again)] == again and batches == all_batches


def test_last_step_boundary_is_not_paused_at():
    trainer = Trainer(constant)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, trainer.interrupt)

    assert [trainer.run([1, 2], max_epochs=1).status for _ in range(2)] == ["running", "completed"]
