"""What Ignite promises of an engine and the Trainer does by its own code: the same calls, the same outcome."""

from __future__ import annotations

import gc
import itertools
import logging
import re
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from ignite.engine import Engine, EventEnum, Events

from ignite_engine import Trainer, TrainingEvents
from tests.builders import events_of, without_address


def constant(engine: Engine, batch: Any) -> float:
    return 1.0


KINDS = pytest.mark.parametrize("kind", [Engine, Trainer], ids=lambda kind: kind.__name__)
"""Ignite's own engine is the reference: a test that it fails tests something else than Ignite's behaviour."""


# -- data --------------------------------------------------------------------------------------------------------------


def counted(count: int) -> Iterator[int]:
    yield from range(count)


@KINDS
@pytest.mark.parametrize(
    "event", [Events.DATALOADER_STOP_ITERATION, Events.ITERATION_COMPLETED(every=5)], ids=without_address
)
def test_iterator_may_be_replaced_where_it_ends(kind: type[Engine], event: Any) -> None:
    seen: list[int] = []
    engine = kind(lambda engine, batch: seen.append(batch))

    @engine.on(event)
    def replace() -> None:
        engine.state.dataloader = counted(5)

    state = engine.run(counted(5), max_epochs=3)

    assert seen == list(range(5)) * 3
    assert (state.epoch, state.iteration) == (3, 15)


@KINDS
def test_dataloader_may_be_replaced_between_epochs(kind: type[Engine]) -> None:
    seen: list[int] = []
    engine = kind(lambda engine, batch: seen.append(batch))

    @engine.on(Events.EPOCH_COMPLETED(once=1))
    def replace() -> None:
        engine.state.dataloader = [10, 20, 30]

    state = engine.run([1, 2, 3], max_epochs=3)

    assert seen == [1, 2, 3, 10, 20, 30, 10, 20, 30]
    assert state.dataloader == [10, 20, 30]


# -- stops and errors --------------------------------------------------------------------------------------------------


@KINDS
def test_refused_arguments_leave_the_loaded_state_alone(kind: type[Engine]) -> None:
    engine = kind(constant)
    saved = {"max_epochs": 9, "epoch_length": 3, "epoch": 4}
    engine.load_state_dict(saved)
    for wrong, message in (
        ({"max_epochs": 3}, "greater than or equal to the start epoch"),
        ({"epoch_length": 2}, "epoch_length should be same as in the state"),
        ({"max_iters": 3}, "To switch from max_epochs to max_iters"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.run([1, 2, 3], **wrong)
    state = engine.run([1, 2, 3])

    assert (state.epoch, state.iteration, engine.should_terminate) == (9, 27, False)


def test_state_loaded_after_an_error_is_taken_up() -> None:
    trainer = Trainer(lambda engine, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run([1, 2, 3])
    trainer.update = constant
    trainer.load_state_dict({"iteration": 4, "max_epochs": 2, "epoch_length": 3})
    seen = events_of(trainer, [Events.ITERATION_STARTED])
    trainer.run([1, 2, 3])

    assert seen == [("ITERATION_STARTED", 2, 5), ("ITERATION_STARTED", 2, 6)]


def test_interrupt_can_be_switched_off_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "interrupt_resume_enabled", False)
    trainer, edges = Trainer(constant), list[int]()
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: edges.append(trainer.state.iteration))
    state = trainer.run([1, 2, 3], max_epochs=2)

    assert edges == [1, 2, 3, 4, 5, 6] and state.status == "completed"
    with pytest.raises(RuntimeError, match="feature is disabled"):
        trainer.interrupt()


# -- the bus -----------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    "event", [Events.ITERATION_COMPLETED, Events.ITERATION_COMPLETED(every=1)], ids=without_address
)
def test_handler_that_answers_every_attribute_is_called_itself(kind: type[Engine], event: Any) -> None:
    handler, engine = MagicMock(spec=None), kind(constant)
    engine.add_event_handler(event, handler, 7, key=8)
    engine.run([1, 2, 3])

    assert [call.args for call in handler.call_args_list] == [(engine, 7)] * 3
    assert [call.kwargs for call in handler.call_args_list] == [{"key": 8}] * 3


@KINDS
def test_last_event_is_ignites_where_nobody_listens_to_ours(kind: type[Engine]) -> None:
    names: list[Any] = []

    def update(engine: Engine, batch: Any) -> float:
        engine.state.metrics["new"] = 1.0
        return 1.0

    engine = kind(update)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: names.append(engine.last_event_name))
    engine.run([1, 2], max_epochs=2, epoch_length=2)
    names.append(engine.last_event_name)

    assert names == [Events.ITERATION_COMPLETED] * 4 + [Events.COMPLETED]


@KINDS
@pytest.mark.parametrize("with_handler", [True, False])
def test_engine_is_freed_with_its_last_reference(kind: type[Engine], with_handler: bool) -> None:
    gc.disable()
    try:
        engine = kind(constant)
        if with_handler:
            engine.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: None)
        engine.run([1, 2], max_epochs=2)
        freed = weakref.ref(engine)
        del engine
        assert freed() is None
    finally:
        gc.enable()


def test_filtered_handler_is_known_by_its_own_name() -> None:
    trainer, calls = Trainer(constant), list[str]()

    def handler() -> None:
        calls.append("called")

    union = Events.EPOCH_COMPLETED(every=2) | Events.COMPLETED
    trainer.add_event_handler(union, handler)
    found = [trainer.has_event_handler(handler, event) for event in (Events.EPOCH_COMPLETED, Events.COMPLETED)]
    missing = trainer.has_event_handler(handler, Events.STARTED)
    trainer.remove_event_handler(handler, Events.EPOCH_COMPLETED)
    trainer.run([1], max_epochs=4)

    assert found == [True, True] and not missing
    assert calls == ["called"] and trainer.has_event_handler(handler)
    with pytest.raises(ValueError, match="is not found among registered"):
        trainer.remove_event_handler(handler, Events.EPOCH_COMPLETED)
    with pytest.raises(ValueError, match="does not exist"):
        trainer.remove_event_handler(handler, Events.INTERRUPT)


class Custom(EventEnum):
    STEP = "step"
    OTHER = "other"


@KINDS
def test_custom_events_fire_with_and_without_a_counter(kind: type[Engine]) -> None:
    heard: list[tuple[str, int]] = []

    def update(engine: Any, batch: int) -> None:
        engine.state.steps = batch
        engine.fire_event(Custom.STEP)
        engine.fire_event(Custom.OTHER)
        engine.fire_event("by name")

    engine: Any = kind(update)
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


@KINDS
def test_handlers_that_cannot_be_called_are_refused_when_added(kind: type[Engine]) -> None:
    engine = kind(constant)

    def takes_two(engine: Engine, needed: int) -> None: ...

    with pytest.raises(ValueError, match="Error adding"):
        engine.add_event_handler(Events.STARTED, takes_two)
    with pytest.raises(ValueError, match="Error adding"):
        engine.add_event_handler(Events.STARTED, takes_two, 1, 2, 3)
    with pytest.raises(ValueError, match="Error adding"):
        kind(lambda batch: None)  # type: ignore[arg-type, misc]
    with pytest.raises(ValueError, match="must be given a processing function"):
        kind(None)  # type: ignore[arg-type]


@KINDS
def test_events_that_bring_an_argument_bring_it_first(kind: type[Engine]) -> None:
    got: list[Any] = []

    def update(engine: Engine, batch: int) -> None:
        if batch == 3:
            raise KeyError("three")

    engine = kind(update)
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda error, word: got.append((type(error), word)), "word")
    engine.add_event_handler(Events.TERMINATE_SINGLE_EPOCH, lambda engine, iter_counter: got.append(iter_counter))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.terminate_epoch)
    engine.run([1, 2, 3], max_epochs=2)

    assert got == [2, (KeyError, "word")]


# -- where a run stands ------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("limit", [{"max_epochs": 5}, {"max_iters": 13}], ids=without_address)
@pytest.mark.parametrize(
    "place", [{"epoch": 2}, {"iteration": 6}, {"iteration": 7}, {"iteration": 8}], ids=without_address
)
def test_state_dict_goes_on_at_an_epoch_or_an_iteration(kind: type[Engine], place: Any, limit: Any) -> None:
    batches: list[int] = []
    engine = kind(lambda engine, batch: batches.append(batch))
    seen = events_of(engine, [Events.EPOCH_STARTED, Events.ITERATION_STARTED, Events.EPOCH_COMPLETED])
    engine.load_state_dict({**place, **limit, "epoch_length": 3})
    state = engine.run([1, 2, 3])

    start, end = place.get("iteration", 6), limit.get("max_iters", 15)
    assert [iteration for name, _, iteration in seen if name == "ITERATION_STARTED"] == list(range(start + 1, end + 1))
    # three integers tell no position in the data: it begins anew, as in Ignite; a Checkpoint of ours takes it up
    assert batches == [1 + index % 3 for index in range(end - start)]
    assert (state.iteration, state.epoch) == (end, 5)
    assert seen[0] == ("EPOCH_STARTED", 3, start)


@KINDS
def test_state_dict_holds_epoch_length_limits_and_what_users_add(kind: type[Engine]) -> None:
    engine: Any = kind(constant)
    engine.state_dict_user_keys.append("alpha")
    engine.state.alpha = 0.5
    engine.run([1, 2, 3], max_epochs=2)
    by_epochs = engine.state_dict()
    engine.state.max_epochs = None
    engine.run([1, 2, 3], max_iters=4)

    assert by_epochs == {"epoch_length": 3, "iteration": 6, "max_epochs": 2, "alpha": 0.5}
    assert engine.state_dict() == {"epoch_length": 3, "iteration": 4, "max_iters": 4, "alpha": 0.5}
    other: Any = kind(constant)
    other.state_dict_user_keys.append("alpha")
    other.load_state_dict(by_epochs)
    assert (other.state.alpha, other.state.epoch, other.state.iteration) == (0.5, 2, 6)
    for wrong, message in (
        ({"epoch_length": 3, "iteration": 6, "max_epochs": 2}, "'alpha' is absent"),
        ({"epoch_length": 3, "iteration": 6, "epoch": 2, "max_epochs": 2}, "only one of 'iteration' or 'epoch'"),
        ({"epoch": 2, "max_epochs": 2, "epoch_length": None}, "epoch_length must be a positive integer"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(wrong)


@KINDS
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_epochs": 3}, "max_epochs should be greater than or equal to the start epoch"),
        ({"max_iters": 30}, "you must first reset by setting 'engine.state.max_epochs = None'"),
        ({"max_epochs": 9, "epoch_length": 2}, "epoch_length should be same as in the state"),
        ({"max_epochs": 0}, "max_epochs is invalid"),
    ],
    ids=without_address,
)
def test_second_run_with_arguments_that_contradict_the_first_is_refused(
    kind: type[Engine], arguments: Any, message: str
) -> None:
    engine = kind(constant)
    engine.run([1, 2, 3], max_epochs=5)
    with pytest.raises(ValueError, match=message):
        engine.run([1, 2, 3], **arguments)
    state = engine.run([1, 2, 3], max_epochs=6)  # and the first may still go on

    assert (state.epoch, state.iteration) == (6, 18)


@KINDS
def test_other_limit_after_a_reset(kind: type[Engine]) -> None:
    engine, starts = kind(constant), list[tuple[int, int]]()
    engine.add_event_handler(Events.STARTED, lambda: starts.append((engine.state.epoch, engine.state.iteration)))
    engine.run([1, 2, 3], max_epochs=2)
    engine.state.max_epochs = None
    engine.run([1, 2, 3], max_iters=4)
    engine.state.max_iters = None
    state = engine.run([1, 2, 3], max_epochs=1)

    assert starts == [(0, 0)] * 3
    assert (state.epoch, state.iteration, state.max_iters) == (1, 3, None)


@KINDS
def test_interrupted_run_may_be_dropped_and_begun_anew(kind: type[Engine]) -> None:
    engine, starts = kind(constant), list[int]()
    engine.add_event_handler(Events.STARTED, lambda: starts.append(engine.state.iteration))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=4), engine.interrupt)
    interrupted = engine.run([1, 2, 3], max_epochs=2).iteration
    engine.state.max_epochs = None
    again = engine.run([1, 2, 3], max_epochs=3).iteration
    state = engine.run([1, 2, 3], max_epochs=3)

    assert (interrupted, again) == (4, 4) and starts == ([0, 0, 4] if kind is Trainer else [0, 0])
    assert (state.epoch, state.iteration) == (3, 9)


@KINDS
def test_data_that_cannot_be_run_over_is_refused(kind: type[Engine]) -> None:
    class NoLength:
        def __len__(self) -> int:
            raise TypeError("no length")

        def __iter__(self) -> Iterator[int]:
            return iter([1, 2, 3])

    with pytest.raises(TypeError, match="data should be iterable"):
        kind(constant).run(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zero size"):
        kind(constant).run([])
    with pytest.raises(ValueError, match="epoch_length should be provided if data is None"):
        kind(constant).run(max_epochs=2)
    state = kind(constant).run(NoLength())
    assert (state.iteration, state.epoch_length) == (3, 3)


@KINDS
def test_iterator_without_end_runs_by_epoch_length_or_until_terminated(kind: type[Engine]) -> None:
    engine = kind(constant)
    state = engine.run(itertools.count(), max_epochs=3, epoch_length=5)
    assert (state.epoch, state.iteration) == (3, 15)

    engine = kind(constant)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=7), engine.terminate)
    state = engine.run(itertools.count())
    assert (state.epoch, state.iteration) == (1, 7)


@KINDS
def test_exhausted_iterator_warns_and_ends(kind: type[Engine]) -> None:
    engine, ended = kind(constant), list[int]()
    engine.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: ended.append(engine.state.iteration))
    with pytest.warns(UserWarning, match="Data iterator can not provide data anymore"):
        state = engine.run(counted(5), max_epochs=3, epoch_length=3)

    assert state.iteration == 5 and ended[0] == 5


@KINDS
def test_batch_may_be_exchanged_before_the_update(kind: type[Engine]) -> None:
    seen: list[int] = []
    engine = kind(lambda engine, batch: seen.append(batch))

    @engine.on(Events.ITERATION_STARTED)
    def exchange() -> None:
        engine.state.batch = 10 * engine.state.batch  # type: ignore[operator]

    engine.run([1, 2, 3])

    assert seen == [10, 20, 30]


@pytest.mark.parametrize("way", ["assigned", "joined", "updated", "set"])
def test_metrics_are_new_in_whatever_way_they_are_written(way: str) -> None:
    trainer, published = Trainer(constant), list[dict[str, Any]]()

    def write() -> None:
        if way == "assigned":  # Ignite's is a plain dict, so users do
            trainer.state.metrics = {"new": 1.0}  # type: ignore[assignment]
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


@KINDS
def test_output_and_times_are_there_at_the_end(kind: type[Engine]) -> None:
    engine, times = kind(lambda engine, batch: batch), list[Any]()
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: times.append(engine.state.times["EPOCH_COMPLETED"]))
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: time.sleep(0.05))
    state = engine.run([1, 2, 3], max_epochs=2)

    assert state.output == 3 and len(times) == 2 and times[0] < 0.05
    assert state.times["COMPLETED"] >= 0.1 and state.times["EPOCH_COMPLETED"] >= 0.05  # type: ignore[operator]


@KINDS
def test_logger_tells_the_start_each_epoch_and_the_end(kind: type[Engine], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = kind(constant)
    engine.logger = logging.getLogger("mine")
    engine.run([1, 2, 3], max_epochs=2)
    lines = [
        re.sub(r"\d\d:\d\d:\d\d\.\d+", "TIME", each.getMessage()) for each in caplog.records if each.name == "mine"
    ]

    assert lines == [
        "Engine run starting with max_epochs=2.",
        "Epoch[1] Complete. Time taken: TIME",
        "Epoch[2] Complete. Time taken: TIME",
        "Engine run finished. Time taken: TIME",
    ]


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
def test_interrupt_at_any_event_pauses_at_the_step_boundary_that_follows(event: Any) -> None:
    def runs_of(interrupts: bool) -> Any:
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


def test_last_step_boundary_is_not_paused_at() -> None:
    trainer = Trainer(constant)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, trainer.interrupt)

    assert [trainer.run([1, 2], max_epochs=1).status for _ in range(2)] == ["running", "completed"]
