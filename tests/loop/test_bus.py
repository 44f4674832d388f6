"""Our events and the order of handlers: phases, filters, errors that name their handler."""

import traceback

import pytest
import torch
from ignite.engine import Engine, Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.events import Phase
from tests.kit.tiny import numbers_loader, trainer_of, weights, without_address
from tests.loop.test_ignite import FILTERS


def constant(engine, batch):
    return 1.0


@pytest.mark.row("A5")
@pytest.mark.parametrize("options", FILTERS, ids=without_address)
def test_filters_work_on_our_events(options):
    steps, engine = [], Engine(constant)
    engine.add_event_handler(Events.ITERATION_COMPLETED(**options), lambda: steps.append(engine.state.iteration))
    engine.run(range(20))
    trainer, heard = trainer_of(), []
    event = TrainingEvents.OPTIMIZER_STEP_COMPLETED(**options)
    trainer.add_event_handler(event, lambda: heard.append(trainer.state.optimizer_steps))
    trainer.run(numbers_loader(20, 1))

    assert heard == steps != []


@pytest.mark.row("A5")
def test_each_of_our_events_counts_its_own():
    trainer, heard = trainer_of(accumulation_steps=3), []
    for event, counter in (
        (TrainingEvents.BACKWARD_COMPLETED, "micro_batches"),
        (TrainingEvents.OPTIMIZER_STEP_COMPLETED, "optimizer_steps"),
        (TrainingEvents.RESUME_POINT, "iteration"),
    ):
        trainer.add_event_handler(
            event(every=4),
            lambda engine, name, counter: heard.append((name, getattr(engine.state, counter))),
            event.name,
            counter,
        )
    trainer.run(numbers_loader(24, 2))

    # 12 micro-batches, 4 updates
    assert heard == [
        *(("BACKWARD_COMPLETED", count) for count in (4, 8, 12)),
        ("OPTIMIZER_STEP_COMPLETED", 4),
        ("RESUME_POINT", 4),
    ]


def test_epoch_filters_and_unions_start_again_with_a_second_run():
    union = Events.EPOCH_COMPLETED(every=2) | Events.ITERATION_COMPLETED(once=3) | TrainingEvents.RESUME_POINT(once=1)
    trainer, heard = Trainer(constant), []
    trainer.add_event_handler(union, lambda: heard.append(trainer.state.iteration))
    for _ in range(2):
        trainer.run(range(5), max_epochs=4)

    assert heard == [1, 3, 10, 20] * 2


@pytest.mark.row("A6")
def test_order_is_the_phase_then_the_attachment():
    trainer, order = Trainer(constant), []

    def handler(name, phase=None):
        def handle():
            order.append(name)

        if phase is not None:
            handle.phase = phase
        return handle

    class Measures:
        phase = Phase.MEASURE

        def method(self):
            order.append("method")

        def __call__(self, engine):
            order.append("call")

    event, measures = Events.ITERATION_COMPLETED, Measures()
    trainer.add_event_handler(event, handler("last", Phase.LAST))
    trainer.add_event_handler(event, handler("first other"))
    trainer.add_event_handler(event, handler("log", Phase.LOG))
    trainer.add_event_handler(event(every=1), handler("measure", Phase.MEASURE))
    trainer.add_event_handler(event, handler("second other"))
    trainer.add_event_handler(event(once=1), handler("evaluate", Phase.EVALUATE))
    trainer.add_event_handler(event, measures.method)
    trainer.add_event_handler(event(every=1), measures)
    trainer.add_event_handler(event, handler("first", Phase.FIRST))
    trainer.run([1])

    assert order == [
        *("first", "evaluate", "measure", "method", "call", "log"),
        *("first other", "second other", "last"),
    ]


def test_handler_of_an_earlier_phase_added_while_its_event_fires_repeats_no_other():
    trainer, calls = Trainer(constant), []

    def early():
        calls.append(f"early {trainer.state.iteration}")

    def add():
        calls.append(f"add {trainer.state.iteration}")
        if trainer.state.iteration == 1:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, early)

    early.phase = Phase.PREPARE
    trainer.add_event_handler(Events.ITERATION_COMPLETED, add)
    trainer.run([1, 2])

    assert calls == ["add 1", "early 1", "early 2", "add 2"]


def test_listeners_that_come_and_go_within_a_group_hear_what_follows():
    trainer, heard = trainer_of(accumulation_steps=5), []

    def later():
        heard.append(trainer.state.micro_batches)

    def come_and_go():
        if trainer.state.micro_batches == 2:
            trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED, later)
        if trainer.state.micro_batches == 4:
            trainer.remove_event_handler(later, TrainingEvents.BACKWARD_COMPLETED)

    trainer.add_event_handler(TrainingEvents.FORWARD_STARTED, come_and_go)
    trainer.run(numbers_loader(20, 2), max_epochs=1)

    assert heard == [2, 3]


@pytest.mark.parametrize("event", ["FORWARD_STARTED", "FORWARD_COMPLETED", "BACKWARD_COMPLETED"])
def test_events_of_a_micro_batch_count_it(event):
    trainer, seen = trainer_of(accumulation_steps=2), []
    for chosen in ({"once": 1}, {"every": 3}):
        handler = lambda: seen.append(trainer.state.micro_batches)  # noqa: E731
        trainer.add_event_handler(TrainingEvents[event](**chosen), handler)
    trainer.run(numbers_loader(12, 2), max_epochs=1)

    assert seen == [1, 3, 6]


@pytest.mark.row("A6")
def test_describe_names_handlers_in_the_order_in_which_they_run():
    trainer = trainer_of()

    def late(): ...
    def early(): ...

    early.phase = Phase.EVALUATE
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=3, after=2), late)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, early)
    trainer.run(numbers_loader(4))
    text = trainer.describe()

    assert text.index("early") < text.index("late") and "(after=2, every=3)" in text
    assert "model: Sequential, one copy" in text and "Resume is exact." in text


@pytest.mark.parametrize("way", ["assigned", "joined", "updated", "set"])
def test_metrics_are_new_in_whatever_way_they_are_written(way):
    trainer, published = Trainer(constant), []

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
    trainer.add_event_handler(
        TrainingEvents.METRICS_READY,
        lambda: published.append((trainer.state.iteration, dict(trainer.state.metrics.fresh))),
    )
    state = trainer.run([1, 2, 3])

    assert published == [(2, {"new": 1.0})] and state.metrics == {"new": 1.0}


# -- errors -----------------------------------------------------------------------------------------------------------


class Broken(Exception): ...


def break_at_the_end(engine):
    raise Broken("why")


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (Events.ITERATION_COMPLETED(every=2), "ITERATION_COMPLETED"),
        (TrainingEvents.RESUME_POINT, "RESUME_POINT"),
        (Events.STARTED, "STARTED"),
        (Events.COMPLETED, "COMPLETED"),
        (Events.GET_BATCH_STARTED, "GET_BATCH_STARTED"),
    ],
)
def test_handler_that_raises_is_named_with_its_event(event, name):
    trainer = Trainer(constant)
    trainer.add_event_handler(event, break_at_the_end)
    with pytest.raises(Broken) as caught:
        trainer.run([1, 2, 3])

    assert type(caught.value) is Broken and caught.value.args == ("why",)
    assert caught.value.__notes__ == [f"Raised by handler break_at_the_end on {name}."]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "break_at_the_end"
    assert trainer.state.status == "failed" and trainer.state.reason == "Broken: why"


def test_update_that_raises_gets_no_note():
    with pytest.raises(Broken) as caught:
        Trainer(lambda engine, batch: break_at_the_end(engine)).run([1])
    assert not hasattr(caught.value, "__notes__")


def test_second_run_after_an_error_starts_clean():
    trainer, reference, data = trainer_of(), trainer_of(), numbers_loader(12, 2, shuffle=True)

    def fail(engine):
        engine.state.metrics["left"] = 1.0
        raise Broken

    handle = trainer.add_event_handler(Events.ITERATION_COMPLETED(once=9), fail)
    with pytest.raises(Broken):
        trainer.run(data, max_epochs=3)
    assert trainer.state.iteration == 9
    handle.remove()
    trainer.update.model.load_state_dict(reference.update.model.state_dict())
    trainer.update.optimizers["optimizer"].state.clear()
    published = []
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: published.append(1))
    state = trainer.run(data, max_epochs=2)
    reference.run(data, max_epochs=2)

    assert (state.status, state.optimizer_steps, state.micro_batches) == ("completed", 12, 12)
    assert "left" not in state.metrics and published == []
    assert torch.equal(weights(trainer), weights(reference))
