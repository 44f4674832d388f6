"""What Ignite promises of an engine and the Trainer does by its own code: the same calls, the same outcome."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader

from ignite_engine import Trainer, TrainingEvents
from tests.engine.builders import events_of


def constant(engine: Engine, batch: Any) -> float:
    return 1.0


KINDS = pytest.mark.parametrize("kind", [Engine, Trainer], ids=lambda kind: kind.__name__)
"""Ignite's own engine is the reference: a test that it fails tests something else than Ignite's behaviour."""


# -- data --------------------------------------------------------------------------------------------------------------


def counted(count: int) -> Iterator[int]:
    yield from range(count)


@KINDS
@pytest.mark.parametrize("event", [Events.DATALOADER_STOP_ITERATION, Events.ITERATION_COMPLETED(every=5)], ids=str)
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


def test_replaced_data_goes_on_in_another_order() -> None:
    """A new loader each epoch over the same samples: what it is made for is another order."""
    epochs: list[list[int]] = [[]]
    trainer = Trainer(lambda engine, batch: epochs[-1].append(int(batch)))

    def replace() -> None:
        epochs.append([])
        trainer.state.dataloader = DataLoader(torch.arange(20), shuffle=True)  # type: ignore[assignment]

    def set_anew() -> None:
        epochs.append([])
        trainer.set_data(DataLoader(torch.arange(20), shuffle=True))

    trainer.add_event_handler(Events.EPOCH_COMPLETED(before=3), replace)
    trainer.add_event_handler(Events.EPOCH_COMPLETED(after=2), set_anew)
    trainer.run(DataLoader(torch.arange(20), shuffle=True), max_epochs=4)

    assert [sorted(order) for order in epochs[:4]] == [list(range(20))] * 4
    assert len({tuple(order) for order in epochs[:4]}) == 4


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
    trainer._process_function = constant
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
@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.ITERATION_COMPLETED(every=1)], ids=str)
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
