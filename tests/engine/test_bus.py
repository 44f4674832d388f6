"""Which handlers of an event run, and in which order."""

import traceback
from typing import Any

import pytest
from ignite.engine import Engine, Events

from ignite_engine import Phase, Trainer, TrainingEvents
from ignite_engine.engine.bus import handlers_of
from tests.kit.tiny import numbers_loader, trainer_of, weights, without_address


def constant(engine, batch):
    return 1.0


def counts_heard(event, *, epochs=1, length=20):
    """The iterations at which a handler of ``event`` runs."""
    trainer, heard = Trainer(constant), list[int]()
    trainer.add_event_handler(event, lambda: heard.append(trainer.state.iteration))
    trainer.run(range(length), max_epochs=epochs)
    return heard


FILTERS = [
    {"every": 1},
    {"every": 4},
    {"once": 7},
    {"once": [3, 17, 9]},
    {"before": 4},
    {"after": 17},
    {"after": 5, "before": 9},
    {"every": 3, "after": 5},
    {"every": 3, "before": 11},
    {"every": 4, "after": 2, "before": 18},
    {"event_filter": lambda engine, event: event in (1, 2, 3, 5, 8, 13)},
]


@pytest.mark.parametrize("options", FILTERS, ids=without_address)
@pytest.mark.parametrize(
    "event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.GET_BATCH_COMPLETED], ids=lambda e: e.name
)
def test_filters_of_ignites_events_are_ignites(event, options):
    theirs, engine = list[int](), Engine(constant)
    engine.add_event_handler(event(**options), lambda: theirs.append(engine.state.iteration))
    engine.run(range(20))

    assert counts_heard(event(**options)) == theirs != []


@pytest.mark.row("A5")
@pytest.mark.parametrize("options", FILTERS, ids=without_address)
def test_filters_work_on_our_events(options):
    steps, engine = list[int](), Engine(constant)
    engine.add_event_handler(Events.ITERATION_COMPLETED(**options), lambda: steps.append(engine.state.iteration))
    engine.run(range(20))
    trainer, heard = trainer_of(), list[int]()
    event = TrainingEvents.OPTIMIZER_STEP_COMPLETED(**options)
    trainer.add_event_handler(event, lambda: heard.append(trainer.state.optimizer_steps))
    trainer.run(numbers_loader(20, 1))

    assert heard == steps != []


@pytest.mark.row("A5")
def test_each_of_our_events_counts_its_own():
    trainer = trainer_of(accumulation_steps=3)
    heard = []
    for event, counter in (
        (TrainingEvents.BACKWARD_COMPLETED, "micro_batches"),
        (TrainingEvents.OPTIMIZER_STEP_COMPLETED, "optimizer_steps"),
        (TrainingEvents.RESUME_POINT, "iteration"),
    ):

        def hear(*, name=event.name, counter=counter):
            heard.append((name, getattr(trainer.state, counter)))

        trainer.add_event_handler(event(every=4), hear)
    trainer.run(numbers_loader(24, 2))

    # 12 micro-batches, 4 updates
    assert heard == [
        ("BACKWARD_COMPLETED", 4),
        ("BACKWARD_COMPLETED", 8),
        ("BACKWARD_COMPLETED", 12),
        ("OPTIMIZER_STEP_COMPLETED", 4),
        ("RESUME_POINT", 4),
    ]


def test_epoch_filters_and_unions():
    union = Events.EPOCH_COMPLETED(every=2) | Events.ITERATION_COMPLETED(once=3) | TrainingEvents.RESUME_POINT(once=1)

    assert counts_heard(union, epochs=4, length=5) == [1, 3, 10, 20]


def test_filters_start_again_with_a_second_run():
    trainer, heard = Trainer(constant), list[int]()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=4), lambda: heard.append(trainer.state.iteration))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda: heard.append(trainer.state.iteration))
    trainer.run(range(7))
    trainer.run(range(9))

    assert heard == [4, 6, 4, 6, 8]


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.row("A6")
def test_order_is_the_phase_then_the_attachment():
    trainer, order = Trainer(constant), list[str]()

    def handler(name, phase=None):
        def handle():
            order.append(name)

        if phase is not None:
            handle.phase = phase
        return handle

    event = Events.ITERATION_COMPLETED
    trainer.add_event_handler(event, handler("first"))
    trainer.add_event_handler(event, handler("log", Phase.LOG))
    trainer.add_event_handler(event(every=1), handler("measure", Phase.MEASURE))
    trainer.add_event_handler(event, handler("second"))
    trainer.add_event_handler(event(once=1), handler("evaluate", Phase.EVALUATE))
    trainer.add_event_handler(event, handler("measure again", Phase.MEASURE))
    trainer.run([1])

    assert order == ["evaluate", "measure", "measure again", "log", "first", "second"]


def test_phase_of_an_object_counts_for_its_methods():
    trainer, order = Trainer(constant), list[str]()

    class Measures:
        phase = Phase.MEASURE

        def method(self):
            order.append("method")

        def __call__(self, engine):
            order.append("call")

    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: order.append("other"))
    measures = Measures()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, measures.method)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=1), measures)
    trainer.run([1])

    assert order == ["method", "call", "other"]


def test_handlers_get_the_arguments_they_were_attached_with():
    trainer, got = Trainer(constant), list[Any]()

    def with_engine(engine, *args, **kwargs):
        got.append((engine, args, kwargs))

    def without(word):
        got.append(word)

    trainer.add_event_handler(Events.COMPLETED, with_engine, 1, 2, key=3)
    trainer.add_event_handler(Events.COMPLETED, without, "word")

    @trainer.on(Events.COMPLETED, 5)
    def decorated(number):
        got.append(number)

    trainer.run([1])

    assert got == [(trainer, (1, 2), {"key": 3}), "word", 5]


def test_removed_handlers_are_not_heard():
    trainer, heard = Trainer(constant), list[str]()

    def plain():
        heard.append("plain")

    def filtered():
        heard.append("filtered")

    def both():
        heard.append("both")

    trainer.add_event_handler(Events.ITERATION_COMPLETED, plain)
    handle = trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), filtered)
    union = trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED, both)
    trainer.run([1, 2])
    trainer.remove_event_handler(plain, Events.ITERATION_COMPLETED)
    handle.remove()
    union.remove()
    trainer.run([1, 2])

    assert heard == ["plain", "plain", "filtered", "both", "both"]
    assert not trainer.has_event_handler(filtered) and not handlers_of(trainer, Events.ITERATION_COMPLETED)


def test_handler_that_removes_itself_lets_the_others_run():
    trainer, heard = Trainer(constant), list[str]()

    def once():
        heard.append("once")
        handle.remove()

    handle = trainer.add_event_handler(Events.ITERATION_COMPLETED, once)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: heard.append("other"))
    trainer.run([1, 2])

    assert heard == ["once", "other", "other"]


@pytest.mark.parametrize("kind", [Engine, Trainer])
def test_handler_added_while_its_event_fires_runs_in_the_same_fire(kind):
    engine, calls = kind(constant), list[int]()

    def add():
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: calls.append(engine.state.iteration))

    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), add)
    engine.run([1, 2, 3, 4])

    assert calls == [2, 3, 4]


def test_handler_of_an_earlier_phase_added_while_its_event_fires_repeats_no_other():
    trainer, calls = Trainer(constant), list[str]()

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


def test_users_filter_is_asked_each_time():
    asked = []

    def ask(engine, event):
        asked.append(event)
        return False

    trainer = Trainer(constant)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=ask), lambda: None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=50), lambda: None)
    trainer.run(range(6))

    assert asked == [1, 2, 3, 4, 5, 6]


def test_event_without_handlers_has_no_listeners():
    trainer = Trainer(constant)

    assert not handlers_of(trainer, TrainingEvents.BACKWARD_COMPLETED)
    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED(every=1000), lambda: None)
    assert handlers_of(trainer, TrainingEvents.BACKWARD_COMPLETED)


# -- errors -----------------------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


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
    def update(engine, batch):
        raise Broken

    with pytest.raises(Broken) as caught:
        Trainer(update).run([1])
    assert not hasattr(caught.value, "__notes__")


def test_second_run_after_an_error_starts_clean():
    trainer, reference = trainer_of(), trainer_of()
    data, seen, failing = numbers_loader(12, 2, shuffle=True), list[tuple[int, int]](), [True]

    def fail(engine):
        engine.state.metrics["left"] = 1.0
        if failing:
            raise Broken

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=9), fail)
    with pytest.raises(Broken):
        trainer.run(data, max_epochs=3)
    assert trainer.state.iteration == 9
    failing.clear()
    trainer.update.model.load_state_dict(reference.update.model.state_dict())
    trainer.update.optimizers["optimizer"].state.clear()
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: seen.append((trainer.state.epoch, trainer.state.iteration))
    )
    state = trainer.run(data, max_epochs=2)
    reference.run(data, max_epochs=2)

    assert seen == [(1 + (i - 1) // 6, i) for i in range(1, 13)]
    assert (state.status, state.optimizer_steps, state.micro_batches) == ("completed", 12, 12)
    assert "left" in state.metrics and state.metrics.fresh == {}

    assert bool((weights(trainer) == weights(reference)).all())


@pytest.mark.parametrize("where", ["update", "handler"])
def test_users_exception_handler_swallows_as_in_ignite(where):
    def runs_of(kind):
        def update(engine, batch):
            if where == "update" and engine.state.iteration == 2:
                raise Broken
            return batch

        engine, seen = kind(update), list[Any]()

        def fail():
            if where == "handler":
                raise Broken

        engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), fail)
        engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: seen.append(type(error)))
        for event in (Events.ITERATION_STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED):
            engine.add_event_handler(
                event, lambda *, name=event.name: seen.append((name, engine.state.iteration, engine.state.batch))
            )
        state = engine.run([10, 20, 30, 40], max_epochs=2)
        return seen, state

    theirs, _ = runs_of(Engine)
    ours, state = runs_of(Trainer)

    assert ours == theirs and Broken in ours
    assert state.status == "completed"


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

    assert text.index("early") < text.index("late")
    assert "late (after=2, every=3)" in text.replace(
        "test_describe_names_handlers_in_the_order_in_which_they_run.<locals>.", ""
    )
    assert "model: Sequential, one copy" in text and "Resume is exact." in text


def test_two_trainers_share_nothing():
    first, second = trainer_of(), Trainer(constant)
    heard = []
    first.add_event_handler(Events.ITERATION_COMPLETED, lambda: heard.append("first"))
    second.add_event_handler(Events.ITERATION_COMPLETED, lambda: first.run(numbers_loader(2)))
    second.run([1, 2])

    assert heard == ["first", "first"]
    assert (first.state.iteration, second.state.iteration) == (1, 2)
