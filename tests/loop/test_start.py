"""How a run starts, goes on and ends: the three values of ``state.start``, limits, stops, and what is refused."""

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average

from ignite_engine import Interrupted, Trainer, TrainingEvents, create_evaluator
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import Checkpoint, EarlyStopping, Evaluation
from ignite_engine.state import Start
from tests.kit.processes import ranks
from tests.kit.refusals import refusals, refuses
from tests.kit.seen import Seen
from tests.kit.tiny import numbers_loader, trainer_of, weights

DATA, OTHER = [1, 2, 3], [7, 8]


def noting():
    """A trainer, the batches of its updates, and ``state.start`` at each STARTED."""
    batches, starts = [], []
    trainer = Trainer(lambda engine, batch: batches.append(batch))
    trainer.add_event_handler(Events.STARTED, lambda: starts.append(trainer.state.start))
    return trainer, batches, starts


def ends(iteration, how):
    """Between two runs: how the first one ends after an iteration."""

    def attach(trainer):
        def end():
            handle.remove()
            if how in (ZeroDivisionError, KeyboardInterrupt):
                raise how
            getattr(trainer, how)(*["enough"] * (how == "request_stop"))

        handle = trainer.add_event_handler(Events.ITERATION_COMPLETED(once=iteration), end)

    return attach


def set_by_hand(trainer):
    trainer.load_state_dict({"iteration": 4, "max_epochs": 2, "epoch_length": 3})


FRESH, CONTINUED = [Start.FRESH] * 2, [Start.FRESH, Start.CONTINUED]
TWO, THREE = {"max_epochs": 2}, {"max_epochs": 3}
STARTS = {
    "the same limit": (None, TWO, TWO, FRESH, DATA * 4, (6, 2)),
    "more epochs": (None, {"max_epochs": 1}, THREE, CONTINUED, DATA * 3, (9, 3)),
    "more iterations": (None, {"max_iters": 4}, {"max_iters": 8}, CONTINUED, (DATA * 3)[:8], (8, 3)),
    "more of both": (
        None,
        {"max_epochs": 2, "max_iters": 4},
        {"max_epochs": 3, "max_iters": 9},
        CONTINUED,
        DATA * 3,
        (9, 3),
    ),
    "stopped": (ends(4, "request_stop"), THREE, THREE, CONTINUED, DATA * 3, (9, 3)),
    "stopped, nearer end": (ends(4, "request_stop"), THREE, TWO, CONTINUED, DATA * 2, (6, 2)),
    "stopped at its end": (ends(6, "request_stop"), TWO, TWO, CONTINUED, DATA * 2, (6, 2)),
    "paused": (ends(4, "interrupt"), THREE, THREE, CONTINUED, DATA * 3, (9, 3)),
    "paused, without arguments": (ends(4, "interrupt"), THREE, {"data": None}, CONTINUED, DATA * 3, (9, 3)),
    "terminated": (ends(4, "terminate"), THREE, THREE, CONTINUED, [*DATA, 1, *DATA], (7, 3)),
    "terminated at an epoch's end": (ends(3, "terminate"), THREE, THREE, CONTINUED, DATA * 3, (9, 3)),
    "failed": (ends(5, ZeroDivisionError), THREE, THREE, FRESH, [*DATA, 1, 2, *DATA * 3], (9, 3)),
    "interrupted by force": (ends(5, KeyboardInterrupt), THREE, THREE, FRESH, [*DATA, 1, 2, *DATA * 3], (9, 3)),
    "stopped, data anew": (ends(4, "request_stop"), THREE, {"data": [*DATA], **THREE}, CONTINUED, DATA * 3, (9, 3)),
    "other data": (None, {"max_iters": 4}, {"data": OTHER, "max_iters": 7}, CONTINUED, [*DATA, 1, 7, 8, 7], (7, 4)),
    "counters set by hand": (None, {"max_epochs": 1}, TWO, CONTINUED, [*DATA, 1, 2], (6, 2)),
}


@pytest.mark.row("A1")
@pytest.mark.parametrize("name", STARTS)
def test_second_run(name):
    attach, first, second, starts, batches, reached = STARTS[name]
    trainer, seen, started = noting()
    if attach is not None:
        attach(trainer)
    try:
        trainer.run(DATA, **first)
    except (ZeroDivisionError, KeyboardInterrupt) as error:
        status, forced = ("interrupted", "forced: ") if isinstance(error, KeyboardInterrupt) else ("failed", "")
        assert trainer.state.status == status and trainer.state.reason.startswith(forced + type(error).__name__)
    if name == "counters set by hand":
        set_by_hand(trainer)
    trainer.run(**{"data": DATA, **second})

    assert started == starts and seen == batches
    assert trainer.state.epoch_length == len(second.get("data") or DATA)
    assert (trainer.state.iteration, trainer.state.epoch) == reached and trainer.state.status == "completed"


def orders(trainer):
    seen = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(trainer.state.batch[0].tolist()))
    return seen


def test_counters_that_ignite_has_saved_at_an_epochs_end_go_on_with_the_next_order():
    whole, trainer = noting()[0], noting()[0]
    expected, seen = orders(whole), orders(trainer)
    whole.run(numbers_loader(8, shuffle=True), max_epochs=3)
    trainer.load_state_dict({"iteration": 4, "max_epochs": 3, "epoch_length": 4})
    trainer.run(numbers_loader(8, shuffle=True), max_epochs=3)

    assert len(expected) == 12 and seen == expected[4:]


@pytest.mark.parametrize("at", [2, 4, 5])
def test_pass_after_a_terminated_one_is_the_next_in_the_order(at):
    """Four shuffled batches in a pass: what is left of one is not made up for."""
    whole, trainer, data = noting()[0], noting()[0], numbers_loader(8, shuffle=True)
    expected, seen = orders(whole), orders(trainer)
    whole.run(numbers_loader(8, shuffle=True), max_epochs=4)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=at), lambda: trainer.terminate())
    for _ in range(2):
        trainer.run(data, max_epochs=4)

    next_pass = (at + 3) // 4
    assert seen[:at] == expected[:at] and seen[at : at + 4] == expected[4 * next_pass : 4 * next_pass + 4]


# -- resumed ----------------------------------------------------------------------------------------------------------


def saved(folder, prepare=lambda trainer: None, event=Events.EPOCH_COMPLETED):
    """A trainer that has resumed what the folder has."""
    trainer, checkpoint = trainer_of(), Checkpoint(folder)
    prepare(trainer)
    checkpoint.attach(trainer, event)
    checkpoint.resume()
    return trainer


@pytest.mark.parametrize(("iterations", "epoch"), [(4, 1), (6, 1), (7, 2)])
def test_resumed_run_starts_in_the_epoch_in_which_it_was_saved(iterations, epoch, tmp_path):
    """Once more, too, after a failure before its first batch; what is measured at STARTED is logged with that epoch."""
    saved(tmp_path).run(numbers_loader(12, 2), max_iters=iterations)
    trainer, seen = saved(tmp_path), []
    for event in (Events.STARTED, Events.EPOCH_STARTED):
        trainer.add_event_handler(event, lambda: seen.append((trainer.state.start, trainer.state.epoch)))
    handle = trainer.add_event_handler(Events.STARTED, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(12, 2), max_epochs=3)
    handle.remove()
    trainer.run(numbers_loader(12, 2), max_epochs=3)

    first = (Start.RESUMED, epoch)
    assert seen == [first, first, *((Start.RESUMED, later) for later in range(epoch + 1, 4))]


@pytest.mark.parametrize("limits", [{"max_iters": 6}, {"max_epochs": 1}, {}])
def test_finished_run_that_is_resumed_trains_nothing_and_more_where_more_is_asked(limits, tmp_path):
    saved(tmp_path).run(numbers_loader(12, 2), max_epochs=1)
    trainer = saved(tmp_path)
    state = trainer.run(numbers_loader(12, 2), **limits)
    assert (state.status, state.iteration, state.epoch, state.optimizer_steps) == ("completed", 6, 1, 6)

    assert saved(tmp_path).run(numbers_loader(12, 2), max_epochs=2).iteration == 12


@pytest.mark.parametrize("epoch_length", [2, 3, 4])
def test_resume_with_an_epoch_length_at_or_below_the_position_ends(tmp_path, epoch_length):
    saved(tmp_path).run(numbers_loader(), max_iters=3)
    state = saved(tmp_path).run(numbers_loader(), max_epochs=2, epoch_length=epoch_length)

    assert state.epoch == 2 and state.iteration == max(3, epoch_length) + epoch_length


def test_checkpoint_that_is_made_before_the_run_is_resumed_at_its_beginning(tmp_path):
    trainer, checkpoint = trainer_of(), Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    checkpoint.save()
    state = saved(tmp_path).run(numbers_loader(8, 2), max_epochs=2)

    assert (state.start, state.iteration, state.epoch) == (Start.RESUMED, 8, 2)


@pytest.mark.parametrize(("limits", "expected"), [({"max_epochs": 2}, [(1, 3), (2, 6)]), ({"max_iters": 3}, [(1, 3)])])
def test_epoch_that_was_saved_when_it_was_full_completes_without_another_iteration(limits, expected, tmp_path):
    """An exception in EPOCH_COMPLETED, saved by ``on_exception``: all iterations of the epoch are done."""
    trainer = trainer_of()
    Checkpoint(tmp_path, on_exception=True).attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(6, 2), **limits)
    resumed, epochs = saved(tmp_path), []
    resumed.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: epochs.append((resumed.state.epoch, resumed.state.iteration))
    )
    resumed.run(numbers_loader(6, 2), **limits)

    assert epochs == expected


@pytest.mark.parametrize("at", [1, 2])
def test_epoch_that_was_ended_where_the_run_stopped_has_no_more_iterations_when_it_is_resumed(at, tmp_path):
    """``terminate_epoch()`` at METRICS_READY of the boundary at which the run stops: the end of the epoch is left."""

    def cut(trainer):
        def stop():
            trainer.request_stop("enough")
            trainer.state.metrics["x"] = 1.0

        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=at), stop)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: trainer.terminate_epoch())

    assert saved(tmp_path, cut).run(numbers_loader(8, 2), max_epochs=2).iteration == at
    trainer, epochs = saved(tmp_path), []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: epochs.append(trainer.state.iteration))
    trainer.run(numbers_loader(8, 2), max_epochs=2)

    assert epochs == [at, at + 4]


def measured(evaluated_at, asked_at, asked):
    """An evaluation, in which the run is stopped, and what a handler asks for when it has the result."""

    def attach(trainer):
        evaluator = create_evaluator(trainer.update.model, lambda model, batch: batch, {"mean": Average()})
        Evaluation(evaluator, [torch.tensor([1.0])] * 2).attach(trainer, evaluated_at)
        EarlyStopping("val/mean", mode="min", patience=9).attach(trainer)

        def ask():
            if trainer.state.evaluations == 1:
                _ = trainer.finish("asked") if asked == "finish" else trainer.terminate_epoch()

        if asked != "nothing":
            trainer.add_event_handler(asked_at, ask)

    return attach


@pytest.mark.parametrize("asked_at", [TrainingEvents.EVALUATION_COMPLETED, TrainingEvents.METRICS_READY])
@pytest.mark.parametrize("asked", ["nothing", "finish", "terminate_epoch"])
@pytest.mark.parametrize(
    "at", [Events.ITERATION_COMPLETED(once=2), Events.ITERATION_COMPLETED(once=4), Events.EPOCH_COMPLETED]
)
def test_what_a_repeated_evaluation_asks_for_happens_as_in_the_whole_run(at, asked, asked_at, tmp_path):
    """An evaluation that a stop broke off is made again before training goes on."""
    outcomes = {}
    for name in ("whole", "cut"):
        lines = []
        for stops in (name == "cut", False):
            trainer = saved(tmp_path / name, measured(at, asked_at, asked))
            if stops:
                trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, lambda: trainer.request_stop("enough"))  # noqa: B023
            for event in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, TrainingEvents.METRICS_READY):
                trainer.add_event_handler(
                    event,
                    lambda engine, event_name, lines=lines: lines.append((event_name, engine.state.iteration)),
                    event.name,
                )
            state = trainer.run(numbers_loader(8, 2), max_epochs=2)
            if name == "whole":
                break
        outcomes[name] = [lines, state.status, state.reason, state.epoch, state.iteration, dict(state.metrics)]
    assert outcomes["cut"] == outcomes["whole"]


# -- requests ---------------------------------------------------------------------------------------------------------


def test_stop_by_a_signal_raises_with_its_code_and_the_first_reason_stays():
    trainer = trainer_of()

    def ask():
        trainer.request_stop("SIGTERM", 15)
        trainer.request_stop("another", 2)

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), ask)
    with pytest.raises(Interrupted) as caught:
        trainer.run(numbers_loader(), max_epochs=3)
    assert (caught.value.code, caught.value.signal, str(caught.value)) == (143, 15, "interrupted by SIGTERM")
    assert (trainer.state.status, trainer.state.reason, trainer.state.iteration) == ("interrupted", "SIGTERM", 4)


@pytest.mark.parametrize("trained", [0, 3])
def test_run_that_is_stopped_at_its_start_trains_nothing(tmp_path, trained):
    def run(folder, stop_at=None):
        trainer = trainer_of()
        Seen().attach(trainer)
        checkpoint = Checkpoint(tmp_path / folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
        if stop_at is not None:
            trainer.add_event_handler(stop_at, lambda: trainer.request_stop("here"))
        return trainer.run(numbers_loader(12, 2, shuffle=True), max_epochs=2), weights(trainer)

    if trained:
        run("cut", Events.ITERATION_COMPLETED(once=trained))
    state, _ = run("cut", Events.STARTED)
    assert (state.status, state.iteration) == ("interrupted", trained)
    assert torch.equal(run("cut")[1], run("whole")[1])


@pytest.mark.parametrize("cut", [False, True])
def test_request_to_save_is_seen_at_one_boundary(cut):
    """Where the epoch is cut short there, at its end."""
    trainer, seen = trainer_of(), []
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), trainer.request_save)
    if cut:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: trainer.state.metrics.update(x=1.0))
        trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: trainer.terminate_epoch())
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT, lambda: seen.append((trainer.state.iteration, trainer.state.save_requested))
    )
    trainer.run(numbers_loader(), max_iters=5)

    assert seen == [(number, number == 3) for number in range(1, 6)]


@pytest.mark.parametrize("asks", ["nothing", "save", "stop"])
@pytest.mark.parametrize("event", [TrainingEvents.METRICS_READY, TrainingEvents.RESUME_POINT])
@pytest.mark.parametrize("at", [2, 4])
def test_what_is_asked_for_where_a_run_pauses_is_done_before(event, at, asks, tmp_path):
    (trainer, seen, _), checkpoint, paused = noting(), Checkpoint(tmp_path), []
    checkpoint.attach(trainer, Events.COMPLETED)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: engine.state.metrics.update(x=1.0))

    def pause(engine):
        if engine.state.iteration == at and not paused:
            paused.append(at)
            engine.interrupt()
            _ = {"save": engine.request_save, "stop": lambda: engine.request_stop("a pause")}.get(asks, list)()

    trainer.add_event_handler(event, pause)
    trainer.run([1, 2, 3, 4], max_epochs=2)
    assert trainer.state.iteration == at and trainer.state.status == "interrupted"
    is_late = event is TrainingEvents.RESUME_POINT and asks == "nothing"  # after what is saved here
    assert [path.name for path in tmp_path.glob("iteration_*")] == [f"iteration_{at:08}"][is_late:]
    trainer.run([1, 2, 3, 4], max_epochs=2)
    assert seen == [1, 2, 3, 4] * 2


def raises_at_the_end(trainer, called):
    trainer.call_at_end(lambda engine: called.append("first"))
    trainer.call_at_end(lambda engine: 1 / 0)
    trainer.call_at_end(lambda engine: called.append("last"))


def test_callbacks_at_the_end_are_called_once_on_an_error_too_and_all_of_them():
    trainer, called = trainer_of(), []
    first = trainer.add_event_handler(Events.STARTED, lambda: raises_at_the_end(trainer, called))
    second = trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: 1 / 0)
    for handle in (second, first):
        with pytest.raises(ZeroDivisionError):
            trainer.run(numbers_loader(4))
        assert called == ["first", "last"]
        called.clear()
        handle.remove()
    trainer.run(numbers_loader(4))
    assert called == []


# -- refused ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "max_epochs": ({"max_epochs": 1.5}, "max_epochs whole number 1.5"),
    "true epochs": ({"max_epochs": True}, "whole number True"),
    "max_iters": ({"max_iters": 2.5}, "max_iters 2.5"),
    "no iteration": ({"max_iters": 0}, "max_iters at least 1 0"),
    "epoch_length": ({"epoch_length": 1.5}, "epoch_length whole number 1.5"),
    "other length": ({"max_epochs": 3, "epoch_length": 2}, "epoch_length same 2 3"),
    "other limit": ({"max_iters": 9}, "max_epochs max_iters"),
    "no data": ({"data": []}, "data zero size"),
}


@pytest.mark.parametrize("how", ["request_stop", "interrupt"])
@pytest.mark.parametrize("name", REFUSED)
def test_run_that_was_stopped_or_paused_survives_what_is_refused(name, how):
    arguments, words = REFUSED[name]
    (trainer, batches, starts), errors = noting(), []
    trainer.add_event_handler(Events.EXCEPTION_RAISED, errors.append)
    ends(4, how)(trainer)
    trainer.run(DATA, max_epochs=3)
    refuses(lambda: trainer.run(**{"data": DATA, **arguments}), ValueError, words)
    trainer.run(DATA, max_epochs=3)

    assert starts == CONTINUED and batches == DATA * 3 and errors == []


def refused(trainer, data=(1, 2, 3), **arguments):
    return lambda: trainer.run(list(data), **arguments)


def cut_at_the_start():
    trainer = noting()[0]
    trainer.add_event_handler(Events.STARTED, lambda: trainer.terminate_epoch())
    trainer.run(DATA)


def constant(engine, batch): ...


test_refusals = refusals(
    [
        ("cut where no epoch is", cut_at_the_start, RuntimeError, "event of an iteration"),
        (
            "groups of nothing",
            lambda: Trainer(constant, 2).run(None, 1, None, 3),
            ValueError,
            "accumulation_steps data",
        ),
        ("not iterable", lambda: Trainer(constant).run(3), TypeError, "iterable int"),
        ("no group", lambda: Trainer(constant, 0), ValueError, "accumulation_steps at least 1 0"),
        ("both", lambda: Trainer(constant, 2, global_micro_batches=2), ValueError, "accumulation_steps global_micro"),
        ("other data", lambda: Trainer(constant).set_data([1]), RuntimeError, "call run()"),
        ("unknown event", lambda: Trainer(constant).fire_event("no_such"), ValueError, "no_such not valid"),
    ]
)


def other_settings(rank):
    said = []
    for steps, epochs, lr in ((2 + 2 * rank, 1, 0.1), (2, 1 + rank, 0.1), (2, 1, 0.1 + rank)):
        trainer = trainer_of(accumulation_steps=steps, lr=lr)
        said.append(str(refuses(lambda: trainer.run(numbers_loader(), max_epochs=epochs), ValueError, "rank 1")))  # noqa: B023
    return said


def test_other_settings_on_a_rank_are_refused_on_all():
    first, second = ranks(2, other_settings)
    assert first == second
    for said, words in zip(first, ("accumulation_steps 2 4", "max_epochs 1 2", "['lr'] 0.1 1.1"), strict=True):
        assert all(word in said for word in words.split())


def test_part_that_nothing_claims_is_an_error_and_waits_for_its_object(tmp_path):
    def attach(trainer):
        Seen(name="mine").attach(trainer)

    saved(tmp_path, attach).run(numbers_loader(), max_iters=2)
    trainer, late = saved(tmp_path), Seen(name="mine")
    trainer.register("another", Seen())
    refuses(
        lambda: trainer.run(numbers_loader(), max_iters=4), StateMismatch, "mine another model resume(ignore=['mine'])"
    )
    late.attach(trainer)
    assert len(late.lines) == 2, "it is loaded at once"
    trainer.run(numbers_loader(), max_iters=4)

    assert len(late.lines) == 4 and trainer.state.start is Start.RESUMED
