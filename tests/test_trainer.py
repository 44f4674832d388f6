"""The loop: exactly as long as asked, event by event as Ignite's, whole again after a resume."""

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import EarlyStopping, TerminateOnNan, Timer
from ignite.metrics import RunningAverage

from ignite_engine import Interrupted, Trainer, TrainingEvents
from tests.kit.tiny import OURS, Numbers, Passes, events_of, numbers_loader, trainer_of, weights


def constant(engine, batch):
    return 1.0


def restored(saved, make=trainer_of):
    trainer = make()
    trainer.registry.load(saved, source="memory")
    return trainer


def capture(trainer):
    import copy

    shared, local = trainer.registry.capture()
    return copy.deepcopy({**shared, **local})


def captures(trainer):
    """Gets what a checkpoint at each clean edge would hold; the last edge of an iteration counts."""
    saved = {}

    def save():
        saved[trainer.state.iteration] = capture(trainer)

    trainer.add_event_handler(TrainingEvents.RESUME_POINT, save)
    return saved


# -- as Ignite --------------------------------------------------------------------------------------------------------


def stop_at(call, event):
    def prepare(engine):
        engine.add_event_handler(event, lambda: getattr(engine, call)())

    return prepare


def terminate_quietly(engine):
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: engine.terminate(skip_completed=True))


def cut_epoch_quietly(engine):
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=4), lambda: engine.terminate_epoch(skip_epoch_completed=True)
    )


def nothing(engine): ...


SCENARIOS = {
    "epochs": (nothing, {"max_epochs": 3}),
    "no limit": (nothing, {}),
    "iterations to an epoch's end": (nothing, {"max_iters": 6}),
    "iterations to an epoch's middle": (nothing, {"max_iters": 5}),
    "one iteration": (nothing, {"max_iters": 1}),
    "fewer than an epoch": (nothing, {"max_iters": 2}),
    "short epochs": (nothing, {"max_epochs": 4, "epoch_length": 2}),
    "epochs that span passes": (nothing, {"max_epochs": 3, "epoch_length": 5}),
    "iterations over long epochs": (nothing, {"max_iters": 8, "epoch_length": 7}),
    "terminate in an epoch": (stop_at("terminate", Events.ITERATION_COMPLETED(once=4)), {"max_epochs": 3}),
    "terminate at its last iteration": (stop_at("terminate", Events.ITERATION_COMPLETED(once=3)), {"max_epochs": 3}),
    "terminate before an iteration": (stop_at("terminate", Events.ITERATION_STARTED(once=4)), {"max_epochs": 3}),
    "terminate while fetching": (stop_at("terminate", Events.GET_BATCH_STARTED(once=4)), {"max_epochs": 3}),
    "terminate after fetching": (stop_at("terminate", Events.GET_BATCH_COMPLETED(once=4)), {"max_epochs": 3}),
    "terminate at the end of data": (stop_at("terminate", Events.DATALOADER_STOP_ITERATION), {"max_epochs": 3}),
    "terminate at an epoch's start": (stop_at("terminate", Events.EPOCH_STARTED(once=2)), {"max_epochs": 3}),
    "terminate at an epoch's end": (stop_at("terminate", Events.EPOCH_COMPLETED(once=2)), {"max_epochs": 3}),
    "terminate at once": (stop_at("terminate", Events.STARTED), {"max_epochs": 3}),
    "terminate without completed": (terminate_quietly, {"max_epochs": 3}),
    "cut an epoch": (stop_at("terminate_epoch", Events.ITERATION_COMPLETED(once=4)), {"max_epochs": 3}),
    "cut an epoch before an iteration": (
        stop_at("terminate_epoch", Events.ITERATION_STARTED(once=5)),
        {"max_epochs": 3},
    ),
    "cut an epoch without its end": (cut_epoch_quietly, {"max_epochs": 3}),
}


def sequence(kind, prepare, arguments):
    batches = []

    def update(engine, batch):
        batches.append(batch)
        return 1.0

    engine = kind(update)
    seen = events_of(engine)
    prepare(engine)
    state = engine.run([1, 2, 3], **arguments)
    return seen, batches, (state.iteration, state.epoch, state.epoch_length)


@pytest.mark.row("A4")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_events_and_batches_are_ignites(scenario):
    prepare, arguments = SCENARIOS[scenario]

    assert sequence(Trainer, prepare, arguments) == sequence(Engine, prepare, arguments)


def test_interrupt_pauses_at_the_next_step_boundary_and_run_continues_there():
    trainer, batches = Trainer(lambda engine, batch: batches.append(batch)), list[Any]()
    seen = events_of(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=[2, 3, 5]), trainer.interrupt)
    pauses = []
    for _ in range(4):
        state = trainer.run([1, 2, 3], max_epochs=2)
        pauses.append((state.iteration, state.epoch, state.status, seen[-1][0]))

    running = [(iteration, epoch, "running", "INTERRUPT") for iteration, epoch in ((2, 1), (3, 1), (5, 2))]
    assert pauses == [*running, (6, 2, "completed", "COMPLETED")] and batches == [1, 2, 3] * 2


def second_run(kind, first, second):
    batches = []
    engine = kind(lambda engine, batch: batches.append(batch))
    seen = events_of(engine)
    engine.run([1, 2, 3], **first)
    engine.run([1, 2, 3], **second)
    return seen, batches, (engine.state.iteration, engine.state.epoch)


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_iters": 4}])
def test_second_run_with_the_same_limit_starts_over_as_ignites(limits):
    assert second_run(Trainer, limits, limits) == second_run(Engine, limits, limits)


@pytest.mark.parametrize(
    ("first", "second"),
    [({"max_epochs": 2}, {"max_epochs": 4}), ({"max_iters": 4}, {"max_iters": 7})],
)
def test_second_run_with_a_larger_limit_continues(first, second):
    """The data goes on where it was, which Ignite begins again."""
    _, batches, reached = second_run(Trainer, first, second)
    whole = list[Any]()
    trainer = Trainer(lambda engine, batch: whole.append(batch))
    trainer.run([1, 2, 3], **second)

    assert batches == whole and reached == (trainer.state.iteration, trainer.state.epoch)


def test_run_without_data_is_ignites():
    def run(kind):
        engine = kind(constant)
        seen = events_of(engine)
        engine.run(max_epochs=2, epoch_length=3)
        return seen

    assert run(Trainer) == run(Engine)
    with pytest.raises(ValueError, match="accumulation_steps needs data to group"):
        Trainer(constant, accumulation_steps=2).run(max_epochs=1, epoch_length=3)


def test_cutting_an_epoch_where_none_runs_is_an_error():
    trainer = Trainer(constant)
    trainer.add_event_handler(Events.STARTED, trainer.terminate_epoch)

    with pytest.raises(RuntimeError, match="call it on an event of an iteration"):
        trainer.run([1])


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


def test_event_that_nobody_registered_is_refused():
    trainer = Trainer(constant)

    with pytest.raises(ValueError, match="not a valid event"):
        trainer.fire_event("no_such_event")


def test_terminate_on_nan_ends_the_run():
    trainer = trainer_of(lr=1e30)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    state = trainer.run(numbers_loader(), max_epochs=6)

    assert 1 < state.iteration < 36


# -- the length of a run ----------------------------------------------------------------------------------------------


def test_one_iteration_trains_once():
    trainer = trainer_of()
    before = weights(trainer)
    state = trainer.run(numbers_loader(), max_iters=1)

    assert (state.iteration, state.optimizer_steps, state.reason) == (1, 1, "max_iters")
    assert not torch.equal(before, weights(trainer))


@pytest.mark.parametrize("accumulation_steps", [None, 4])
def test_resume_before_the_last_iteration_runs_that_one_only(accumulation_steps):
    def make():
        return trainer_of(accumulation_steps=accumulation_steps)

    whole = make()
    saved = captures(whole)
    whole.run(numbers_loader(12, 2, shuffle=True), max_iters=9)
    rest = restored(saved[8], make)
    seen = events_of(rest, (Events.ITERATION_STARTED, Events.EPOCH_STARTED))
    state = rest.run(numbers_loader(12, 2, shuffle=True), max_iters=9)

    assert [each for each in seen if each[0] == "ITERATION_STARTED"] == [("ITERATION_STARTED", state.epoch, 9)]
    assert torch.equal(weights(rest), weights(whole))
    assert (state.optimizer_steps, state.micro_batches) == (9, whole.state.micro_batches)


@pytest.mark.parametrize("limit", [{"max_iters": 6}, {"max_epochs": 2}])
def test_resumed_finished_run_only_completes(limit):
    whole = trainer_of()
    saved = captures(whole)
    whole.run(numbers_loader(6, 2), **limit)
    again = restored(saved[6])
    seen = events_of(again, (*Events, *OURS))
    state = again.run(numbers_loader(6, 2), **limit)

    assert seen == [("STARTED", 2, 6), ("COMPLETED", 2, 6)]
    assert (state.status, state.reason, state.iteration) == ("completed", next(iter(limit)), 6)
    assert torch.equal(weights(again), weights(whole))


def test_resumed_finished_run_without_a_limit_trains_nothing():
    whole = trainer_of()
    saved = captures(whole)
    whole.run(numbers_loader(6, 2), max_epochs=2)
    again = restored(saved[6])
    seen = events_of(again, (Events.ITERATION_STARTED,))
    state = again.run(numbers_loader(6, 2))

    assert seen == [] and (state.status, state.iteration, state.max_epochs) == ("completed", 6, 2)


def test_finished_run_goes_on_where_more_is_asked():
    whole, first = trainer_of(), trainer_of()
    whole.run(numbers_loader(shuffle=True), max_epochs=4)
    saved = captures(first)
    first.run(numbers_loader(shuffle=True), max_epochs=2)
    more = restored(saved[12])
    state = more.run(numbers_loader(shuffle=True), max_epochs=4)

    assert (state.epoch, state.iteration) == (4, 24)
    assert torch.equal(weights(more), weights(whole))


@pytest.mark.row("D13")
def test_every_edge_of_a_run_resumes_bit_for_bit():
    def run(trainer):
        return trainer.run(numbers_loader(14, 2, shuffle=True), max_epochs=3)

    whole = trainer_of(accumulation_steps=3)
    saved = captures(whole)
    losses = {}
    whole.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: losses.__setitem__(whole.state.iteration, whole.state.output["loss"].item())
    )
    run(whole)
    assert sorted(saved) == list(range(1, 10))  # 7 batches by 3 in each of 3 epochs
    for iteration, state in saved.items():
        rest = restored(state, lambda: trainer_of(accumulation_steps=3))
        seen = {}

        def note(engine, seen=seen):
            seen[engine.state.iteration] = engine.state.output["loss"].item()

        rest.add_event_handler(Events.ITERATION_COMPLETED, note)
        run(rest)
        assert seen == {number: loss for number, loss in losses.items() if number > iteration}
        assert torch.equal(weights(rest), weights(whole))
        assert (rest.state.epoch, rest.state.iteration) == (3, 9)


@pytest.fixture(params=["MT19937", "PCG64"])
def numpys(request):
    """NumPy's global generator is of this kind."""
    np.random.set_bit_generator(getattr(np.random, request.param)(1))
    yield
    np.random.set_bit_generator(np.random.MT19937(0))


@pytest.mark.usefixtures("numpys")
def test_resumed_run_draws_on_from_every_generator_of_the_host():
    drawn = []

    def make():
        def draw(engine, batch):
            drawn.append((random.random(), np.random.random(), torch.rand(()).item()))
            return 0.0

        return Trainer(draw)

    whole = make()
    saved = captures(whole)
    whole.run(numbers_loader(6, 2), max_iters=3)
    restored(saved[1], make).run(numbers_loader(6, 2), max_iters=3)

    assert drawn[3:] == drawn[1:3]


def test_resume_with_other_accumulation_keeps_to_the_data():
    """Iterations are another unit then: what counts is the position in the data."""
    first = trainer_of(accumulation_steps=1)
    saved = captures(first)
    first.run(numbers_loader(12, 2), max_epochs=3)
    rest = restored(saved[8], lambda: trainer_of(accumulation_steps=2))  # 2 of 6 batches into epoch 2
    seen = []
    rest.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append((rest.state.epoch, len(rest.state.batch))))
    state = rest.run(numbers_loader(12, 2), max_epochs=3)

    assert seen == [(2, 2), (2, 2), (3, 2), (3, 2), (3, 2)]
    assert (state.epoch, state.iteration, state.status) == (3, 13, "completed")


def test_stop_at_the_last_iteration_and_run_again_only_completes():
    trainer = trainer_of()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda: trainer.request_stop("enough"))
    state = trainer.run(numbers_loader(6, 2), max_epochs=2)
    assert (state.status, state.reason, state.iteration) == ("interrupted", "enough", 6)
    before = weights(trainer)
    seen = events_of(trainer)
    state = trainer.run(numbers_loader(6, 2), max_epochs=2)

    assert [name for name, *_ in seen] == ["STARTED", "COMPLETED"]
    assert state.status == "completed" and torch.equal(before, weights(trainer))


# -- the order of the data --------------------------------------------------------------------------------------------


def orders(seed, epochs=3, **options):
    data, trainer, each = Numbers(10), Trainer(constant), list[list[int]]()
    from ignite_engine import loader

    def cut():
        each.append(data.loaded[:])
        data.loaded.clear()

    trainer.add_event_handler(Events.EPOCH_COMPLETED, cut)
    trainer.run(loader(data, 3, seed=seed, **options), max_epochs=epochs)
    return each


@pytest.mark.row("A2")
def test_order_is_a_function_of_seed_and_epoch():
    torch.manual_seed(0)
    first = orders(5, shuffle=True)
    torch.manual_seed(1)

    assert orders(5, shuffle=True) == first
    assert all(sorted(order) == list(range(10)) for order in first)
    assert len({tuple(order) for order in first + orders(6, shuffle=True)}) == 6
    assert orders(5) == [list(range(10))] * 3


# -- data without a length --------------------------------------------------------------------------------------------


@pytest.mark.row("A2")
def test_passes_without_a_length_are_measured_anew():
    trainer, seen, lengths = Trainer(constant), list[tuple[int, float]](), list[Any]()
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: seen.append((trainer.state.epoch, trainer.state.batch.item()))
    )
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: lengths.append(trainer.state.epoch_length))
    state = trainer.run(Passes(3, 5, 2), max_epochs=3)

    expected = [(1, 100.0), (1, 101.0), (1, 102.0), (2, 200.0), (2, 201.0), (2, 202.0), (2, 203.0), (2, 204.0)]
    assert seen == [*expected, (3, 300.0), (3, 301.0)]
    assert lengths == [3, 5, 2]
    assert (state.iteration, state.epoch, state.reason) == (10, 3, "max_epochs")


def test_groups_end_with_their_pass():
    trainer, sizes = Trainer(constant, accumulation_steps=2), list[tuple[int, int]]()
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: sizes.append((trainer.state.epoch, len(trainer.state.batch)))
    )
    trainer.run(Passes(3, 5, 2), max_epochs=3)

    assert sizes == [(1, 2), (1, 1), (2, 2), (2, 2), (2, 1), (3, 2)]


def test_explicit_epoch_length_lets_a_pass_span_epochs():
    trainer, seen = Trainer(constant), list[tuple[int, float]]()
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: seen.append((trainer.state.epoch, trainer.state.batch.item()))
    )
    trainer.run(Passes(3, 5, 2), max_epochs=2, epoch_length=4)

    assert seen == [(1, 100), (1, 101), (1, 102), (1, 200), (2, 201), (2, 202), (2, 203), (2, 204)]


def test_exact_number_of_iterations_over_passes_without_a_length():
    trainer = Trainer(constant)
    state = trainer.run(Passes(3, 5, 2), max_iters=9)

    assert (state.iteration, state.epoch, state.reason) == (9, 3, "max_iters")


def test_position_counts_the_group_whose_error_was_swallowed():
    def make():
        seen = []

        def update(engine, batch):
            if engine.state.iteration == 2:
                raise KeyError
            seen.extend(batch.tolist())

        trainer = Trainer(update)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
        return trainer, seen

    def data():
        from ignite_engine import loader

        return loader(torch.arange(8), 1)

    whole, seen = make()
    saved = captures(whole)
    whole.run(data(), max_epochs=2)
    rest, seen_again = make()
    rest.registry.load(saved[5], source="memory")
    rest.run(data(), max_epochs=2)

    # the second group ends the epoch, as in Ignite; the next one goes on with the third
    assert seen == [0, 2, 3, 4, 5, 6, 7, 0, 1]
    assert seen_again == seen[4:]


# -- who is registered ------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self, name):
        self.name, self.count = name, 0

    def attach(self, trainer):
        trainer.register(self.name, self)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self)

    def __call__(self, engine):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def saved_with_counter():
    trainer = trainer_of()
    Counter("counter").attach(trainer)
    saved = captures(trainer)
    trainer.run(numbers_loader(), max_iters=5)
    return saved[5]


def test_leftover_names_are_an_error_that_lists_both_sides():
    trainer = restored(saved_with_counter())
    trainer.register("another", Counter("another"))

    with pytest.raises(ValueError) as caught:
        trainer.run(numbers_loader(), max_iters=6)
    message = str(caught.value)
    assert "holds ['counter'], for which nothing is registered" in message
    assert "'another'" in message and "'model'" in message and "resume(ignore=['counter'])" in message
    assert trainer.state.iteration == 5


def test_mended_after_a_leftover_name_the_run_goes_on():
    trainer = restored(saved_with_counter())
    with pytest.raises(ValueError, match="nothing is registered"):
        trainer.run(numbers_loader(), max_iters=6)
    counter = Counter("counter")
    counter.attach(trainer)
    state = trainer.run(numbers_loader(), max_iters=6)

    assert (counter.count, state.iteration, state.optimizer_steps) == (6, 6, 6)


def test_late_registration_loads_at_once():
    trainer, counter = restored(saved_with_counter()), Counter("counter")
    trainer.register("counter", counter)

    assert counter.count == 5
    trainer.run(numbers_loader(), max_iters=6)


def test_registration_on_started_is_early_enough():
    trainer, counter = restored(saved_with_counter()), Counter("counter")
    trainer.add_event_handler(Events.STARTED, lambda: counter.attach(trainer))
    trainer.run(numbers_loader(), max_iters=7)

    assert counter.count == 7


def test_left_out_names_start_fresh(caplog):
    saved, trainer, counter = saved_with_counter(), trainer_of(), Counter("counter")
    counter.attach(trainer)
    trainer.registry.load(saved, source="memory", ignore=["counter"])
    trainer.run(numbers_loader(), max_iters=6)

    assert counter.count == 1
    trainer.registry.load(saved, source="memory", ignore=["nothing"])
    assert "memory holds no nothing to leave out" in caplog.text
    del saved["counter"]
    with caplog.at_level(logging.WARNING):
        trainer.registry.load(saved, source="memory")
    assert "holds no state of counter" in caplog.text


# -- stops ------------------------------------------------------------------------------------------------------------


def test_requested_stop_ends_at_a_clean_edge():
    trainer = trainer_of(accumulation_steps=2)
    seen = events_of(trainer, (*Events, TrainingEvents.RESUME_POINT))
    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED(once=5), lambda: trainer.request_stop("disk"))
    state = trainer.run(numbers_loader(), max_epochs=3)

    # the fifth micro-batch is in the third update, the last of the epoch
    assert (state.status, state.reason, state.iteration) == ("interrupted", "disk", 3)
    assert [name for name, *_ in seen[-5:]] == [
        "ITERATION_COMPLETED", "EPOCH_COMPLETED", "RESUME_POINT", "TERMINATE", "COMPLETED",
    ]  # fmt: skip
    state = trainer.run(numbers_loader(), max_epochs=3)
    whole = trainer_of(accumulation_steps=2)
    whole.run(numbers_loader(), max_epochs=3)
    assert (state.status, state.iteration) == ("completed", 9)
    assert torch.equal(weights(trainer), weights(whole))


def test_stop_by_a_signal_raises_with_its_code():
    trainer = trainer_of()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: trainer.request_stop("SIGTERM", 15))

    with pytest.raises(Interrupted) as caught:
        trainer.run(numbers_loader(), max_epochs=3)
    assert (caught.value.code, caught.value.signal, str(caught.value)) == (143, 15, "interrupted by SIGTERM")
    assert trainer.state.iteration == 4


def test_request_to_save_is_seen_at_one_edge():
    trainer, seen = trainer_of(), list[tuple[int, bool]]()
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), trainer.request_save)
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT, lambda: seen.append((trainer.state.iteration, trainer.state.save_requested))
    )
    trainer.run(numbers_loader(), max_iters=5)

    assert [iteration for iteration, requested in seen if requested] == [3]


def test_values_are_published_once_at_the_edge():
    trainer, published = trainer_of(), list[Any]()
    order = []

    def write(engine):
        engine.state.metrics["early"] = 1.0
        engine.state.metrics.update(late=2.0)

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), write)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.state.metrics.__setitem__("epoch", 3.0))
    for event in (
        Events.ITERATION_COMPLETED,
        Events.EPOCH_COMPLETED,
        TrainingEvents.METRICS_READY,
        TrainingEvents.RESUME_POINT,
    ):
        trainer.add_event_handler(event(once=[1, 2, 3]), lambda *, name=event.name: order.append(name))
    trainer.add_event_handler(
        TrainingEvents.METRICS_READY,
        lambda: published.append((trainer.state.iteration, dict(trainer.state.metrics.fresh))),
    )
    trainer.run(numbers_loader(6, 2))

    assert published == [(2, {"early": 1.0, "late": 2.0}), (3, {"epoch": 3.0})]
    assert order == [
        "ITERATION_COMPLETED", "RESUME_POINT",
        "ITERATION_COMPLETED", "METRICS_READY", "RESUME_POINT",
        "ITERATION_COMPLETED", "EPOCH_COMPLETED", "METRICS_READY", "RESUME_POINT",
    ]  # fmt: skip


def test_resume_point_of_an_epochs_end_says_epoch_n_plus_1_batch_0():
    trainer = trainer_of()
    saved = captures(trainer)
    trainer.run(numbers_loader(6, 2), max_epochs=2)

    position = saved[3]["trainer"]
    assert (position["epochs_completed"], position["epoch_iteration"]) == (1, 0)
    assert (saved[3]["data"]["pass"], saved[3]["data"]["batch"]) == (1, 0)
    assert (saved[4]["data"]["pass"], saved[4]["data"]["batch"]) == (1, 1)


def test_callbacks_at_the_end_are_called_on_an_error_too():
    trainer, called = trainer_of(), list[str]()
    trainer.add_event_handler(Events.STARTED, lambda: trainer.call_at_end(lambda engine: called.append("end")))
    trainer.run(numbers_loader(4))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(4))

    assert called == ["end", "end"]


def test_callback_at_the_end_that_raises_keeps_none_from_being_called():
    trainer, called = trainer_of(), list[str]()

    def ask():
        trainer.call_at_end(lambda engine: called.append("first"))
        trainer.call_at_end(lambda engine: 1 / 0)
        trainer.call_at_end(lambda engine: called.append("last"))

    handle = trainer.add_event_handler(Events.STARTED, ask)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(4))
    handle.remove()
    trainer.run(numbers_loader(4))

    assert called == ["first", "last"]


def test_data_and_accumulation_are_a_runs_for_good():
    trainer = Trainer(constant, accumulation_steps=1)
    with pytest.raises(RuntimeError, match="call run"):
        trainer.set_data([10, 20, 30])
    with pytest.raises(AttributeError, match="resume it with another"):
        trainer.accumulation_steps = 2


def test_model_is_put_into_train_mode():
    trainer = trainer_of()
    trainer.update.model.eval()
    trainer.run(numbers_loader(4))

    assert trainer.update.model.training
