"""What Ignite promises of an engine: the same scenario on its engine and on a Trainer has the same outcome."""

from contextlib import suppress

import pytest
from ignite.engine import Engine, EventEnum, Events
from ignite.handlers import EarlyStopping, TerminateOnNan, Timer
from ignite.metrics import RunningAverage

from ignite_engine import Trainer, TrainingEvents
from tests.kit.tiny import events_of, numbers_loader, trainer_of, without_address

DATA = [1, 2, 3]


def stop_at(call, event, **options):
    """``engine.call(**options)`` at ``event``."""
    return lambda engine: engine.add_event_handler(event, lambda: getattr(engine, call)(**options))


def nothing(engine): ...


IN_FOUR = Events.ITERATION_COMPLETED(once=4)
RUNS = {
    "epochs": (nothing, {"max_epochs": 3}),
    "iterations to an epoch's middle": (nothing, {"max_iters": 5}),
    "short epochs": (nothing, {"max_epochs": 4, "epoch_length": 2}),
    "epochs that span passes": (nothing, {"max_epochs": 3, "epoch_length": 5}),
    "iterations over long epochs": (nothing, {"max_iters": 8, "epoch_length": 7}),
    "terminate in an epoch": (stop_at("terminate", IN_FOUR), {"max_epochs": 3}),
    "terminate before an iteration": (stop_at("terminate", Events.ITERATION_STARTED(once=4)), {"max_epochs": 3}),
    "terminate while fetching": (stop_at("terminate", Events.GET_BATCH_STARTED(once=4)), {"max_epochs": 3}),
    "terminate at the end of data": (stop_at("terminate", Events.DATALOADER_STOP_ITERATION), {"max_epochs": 3}),
    "terminate at an epoch's start": (stop_at("terminate", Events.EPOCH_STARTED(once=2)), {"max_epochs": 3}),
    "terminate at an epoch's end": (stop_at("terminate", Events.EPOCH_COMPLETED(once=2)), {"max_epochs": 3}),
    "terminate without completed": (stop_at("terminate", IN_FOUR, skip_completed=True), {"max_epochs": 3}),
    "cut an epoch": (stop_at("terminate_epoch", IN_FOUR), {"max_epochs": 3}),
    "cut it before an iteration": (stop_at("terminate_epoch", Events.ITERATION_STARTED(once=5)), {"max_epochs": 3}),
    "cut it without its end": (stop_at("terminate_epoch", IN_FOUR, skip_epoch_completed=True), {"max_epochs": 3}),
}


def run(prepare, arguments):
    def scenario(engine):
        seen = events_of(engine)
        prepare(engine)
        state = engine.run(DATA, **arguments)
        return [seen, state.iteration, state.epoch, state.epoch_length]

    return scenario


def twice(first, second):
    def scenario(engine):
        seen = events_of(engine)
        engine.run(DATA, **first)
        engine.run(DATA, **second)
        return [seen, engine.state.iteration, engine.state.epoch]

    return scenario


def terminated_twice(engine):
    engine.add_event_handler(IN_FOUR, lambda: engine.terminate())
    return twice({"max_epochs": 4}, {"max_epochs": 4})(engine)


def without_data(engine):
    seen = events_of(engine)
    engine.run(max_epochs=2, epoch_length=3)
    return seen


def filtered(event, options):
    def scenario(engine):
        heard = []
        engine.add_event_handler(event(**options), lambda: heard.append(engine.state.iteration))
        engine.run(range(20))
        assert heard
        return heard

    return scenario


FILTERS = [
    {"every": 1},
    {"every": 4},
    {"once": 7},
    {"once": [3, 17, 9]},
    {"before": 4},
    {"after": 17},
    {"after": 5, "before": 9},
    {"every": 3, "after": 5},
    {"every": 4, "after": 2, "before": 18},
    {"event_filter": lambda engine, event: event in (1, 2, 3, 5, 8, 13)},
]


def added_while_it_fires(engine):
    calls = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=2),
        lambda: engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: calls.append(engine.state.iteration)),
    )
    engine.run([1, 2, 3, 4])
    return calls


def removes_itself(engine):
    heard = []

    def once():
        heard.append("once")
        handle.remove()

    handle = engine.add_event_handler(Events.ITERATION_COMPLETED, once)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: heard.append("other"))
    engine.run([1, 2])
    return heard


def removed(engine):
    heard = []

    def plain():
        heard.append("plain")

    engine.add_event_handler(Events.ITERATION_COMPLETED, plain)
    handles = [
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: heard.append("filtered")),
        engine.add_event_handler(
            Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED, lambda: heard.append("union")
        ),
    ]
    engine.run([1, 2])
    engine.remove_event_handler(plain, Events.ITERATION_COMPLETED)
    for handle in handles:
        handle.remove()
    engine.run([1, 2])
    return [heard, engine.has_event_handler(plain)]


def arguments_of_handlers(engine):
    got = []
    engine.add_event_handler(
        Events.COMPLETED, lambda own, *args, **kwargs: got.append((own is engine, args, kwargs)), 1, 2, key=3
    )
    engine.add_event_handler(Events.COMPLETED, lambda word: got.append(word), "word")

    @engine.on(Events.COMPLETED, 5)
    def decorated(number):
        got.append(number)

    engine.run([1])
    return got


class Custom(EventEnum):
    STEP = "step"
    OTHER = "other"


def custom_events(engine):
    heard = []

    def fire():
        engine.state.steps = engine.state.batch
        for event in (Custom.STEP, Custom.OTHER, "by name"):
            engine.fire_event(event)

    engine.register_events(*Custom, "by name", event_to_attr={Custom.STEP: "steps"})
    engine.add_event_handler(Events.ITERATION_COMPLETED, fire)
    engine.add_event_handler(Custom.STEP(every=2), lambda: heard.append(("every", engine.state.steps)))
    engine.add_event_handler(Custom.OTHER | Events.COMPLETED, lambda: heard.append(("other", engine.state.steps)))
    engine.add_event_handler("by name", lambda word: heard.append((word, engine.state.steps)), "name")
    engine.run(DATA)
    for call in (
        lambda: engine.register_events(1),
        lambda: engine.add_event_handler("unknown", fire),
        lambda: engine.fire_event("unknown"),
    ):
        try:
            call()
        except (TypeError, ValueError) as error:
            heard.append(type(error))
    return heard


def filter_without_a_counter(engine):
    engine.add_event_handler(Events.DATALOADER_STOP_ITERATION(once=1), lambda: None)
    with pytest.raises(RuntimeError):
        engine.run(DATA, max_epochs=2)


def swallowed_error(engine):
    """The epoch ends where a handler raised, if EXCEPTION_RAISED has a handler that does not."""
    seen = []
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error: seen.append(type(error)))
    for event in (Events.ITERATION_STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED):
        engine.add_event_handler(
            event, lambda name: seen.append((name, engine.state.iteration, engine.state.batch)), event.name
        )
    engine.run([10, 20, 30, 40], max_epochs=2)
    return seen


def raised_again(engine):
    """Its handler is called once."""
    errors = []

    def again(error):
        errors.append(type(error))
        raise error

    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    engine.add_event_handler(Events.EXCEPTION_RAISED, again)
    with suppress(ZeroDivisionError):
        engine.run(DATA)
    return errors[:1]


SCENARIOS = {
    **{f"run: {name}": run(*each) for name, each in RUNS.items()},
    "second run by epochs": twice({"max_epochs": 2}, {"max_epochs": 2}),
    "second run by iterations": twice({"max_iters": 4}, {"max_iters": 4}),
    "terminated run again": terminated_twice,
    "without data": without_data,
    **{
        without_address(f"{event.name} {options}"): filtered(event, options)
        for options in FILTERS
        for event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.GET_BATCH_COMPLETED)
    },
    "handler that is added while its event fires": added_while_it_fires,
    "handler that removes itself": removes_itself,
    "handlers that are removed": removed,
    "arguments of handlers": arguments_of_handlers,
    "custom events": custom_events,
    "filter of an event without a counter": filter_without_a_counter,
    "swallowed error": swallowed_error,
    "error that is raised again": raised_again,
}


@pytest.mark.row("A4")
@pytest.mark.parametrize("name", SCENARIOS)
def test_outcome_is_ignites(name):
    outcomes = []
    for kind in (Engine, Trainer):
        batches = []
        outcomes.append((SCENARIOS[name](kind(lambda engine, batch: batches.append(batch))), batches))  # noqa: B023

    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, TrainingEvents.BACKWARD_COMPLETED])
def test_error_in_the_update_may_be_swallowed_too(event):
    trainer, errors = trainer_of(), []
    trainer.add_event_handler(event(once=2), lambda: 1 / 0)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: errors.append(type(error)))
    state = trainer.run(numbers_loader(12, 2), max_epochs=2)

    # the epoch ends there, and the next one goes on with the third group
    assert errors == [ZeroDivisionError] and state.status == "completed" and (state.iteration, state.epoch) == (8, 2)


def test_ignites_handlers_attach_unchanged():
    trainer = trainer_of()
    timer, scores = Timer(average=True), iter([1.0, 3.0, 2.0, 2.0, 2.0, 2.0])
    timer.attach(trainer, start=Events.STARTED, step=Events.ITERATION_COMPLETED)
    RunningAverage(output_transform=lambda output: output["loss"]).attach(trainer, "average")
    RunningAverage(alpha=0.5, output_transform=lambda output: output["loss"].item()).attach(trainer, "half")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    stopping = EarlyStopping(patience=2, score_function=lambda engine: next(scores), trainer=trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, stopping)
    state = trainer.run(numbers_loader(), max_epochs=6)

    # best in epoch 2, then two epochs of patience
    assert (state.epoch, state.iteration, timer.step_count) == (4, 24, 24.0)
    assert {"average", "half"} <= set(state.metrics)
    assert (state.status, state.reason) == ("completed", "terminate")


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
        batches = []
        trainer = Trainer(lambda engine, batch: batches.append(batch))
        seen = events_of(trainer)
        if interrupts:
            trainer.add_event_handler(event, trainer.interrupt)
            trainer.run(DATA, max_epochs=4)
        at = len(seen)
        trainer.run(DATA, max_epochs=4)
        return seen, batches, at

    seen, batches, at = runs_of(True)
    whole, all_batches, _ = runs_of(False)

    # one STARTED more, and no EPOCH_STARTED for an epoch that has begun
    assert seen[: at - 1] + seen[at + 1 :] == whole and batches == all_batches
    assert seen[at - 1][0] == "INTERRUPT" and seen[at - 2][0] in ("ITERATION_COMPLETED", "EPOCH_COMPLETED")
    assert seen[at][0] == "STARTED"


def test_last_step_boundary_is_not_paused_at_and_others_each_time():
    trainer = Trainer(lambda engine, batch: None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, trainer.interrupt)

    states = [(trainer.run([1, 2], max_epochs=2).status, trainer.state.iteration) for _ in range(4)]
    assert states == [("interrupted", 1), ("interrupted", 2), ("interrupted", 3), ("completed", 4)]
