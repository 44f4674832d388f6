"""A signal stops a run at a step boundary, saved, with the exit code of the signal."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Interrupted, Trainer, TrainingEvents
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.handlers import Checkpoint, Evaluation, GracefulStop
from ignite_engine.ranks import signals
from tests.faults.commands import program
from tests.kit.tiny import numbers_loader, trainer_of, weights
from tests.ranks.forkserver import on_ranks

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def own_handlers():
    """After a stop SIGTERM stays ignored, which the other tests must not inherit."""
    before = {number: signal.getsignal(number) for number in (*SIGNALS, *signals.FORWARDED.values())}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    """To this process; the handler has run when this returns."""
    signal.raise_signal(number)


def stoppable(directory, *, exit=True):
    trainer = trainer_of(accumulation_steps=2)
    Checkpoint(directory).attach(trainer, Events.ITERATION_COMPLETED(every=1000))
    GracefulStop(exit=exit).attach(trainer)
    return trainer


def iterations(directory):
    return [each.iteration for each in CheckpointStore(directory).checkpoints()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_run_at_a_saved_step_boundary(number, tmp_path):
    trainer, fired = stoppable(tmp_path), list[str]()
    # in the middle of the second update
    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED(once=3), lambda: send(number))
    trainer.add_event_handler(Events.COMPLETED, lambda: fired.append("COMPLETED"))
    with pytest.raises(Interrupted) as caught:
        trainer.run(numbers_loader(), max_epochs=3)

    assert caught.value.code == 128 + number and fired == ["COMPLETED"]
    assert (trainer.state.iteration, trainer.state.micro_batches) == (2, 4)
    assert (trainer.state.status, trainer.state.reason) == ("interrupted", number.name)
    assert iterations(tmp_path) == [2]


def test_stopped_run_resumes_to_the_bits_of_the_whole_one(tmp_path):
    whole = trainer_of(accumulation_steps=2)
    whole.run(numbers_loader(shuffle=True), max_epochs=3)
    trainer = stoppable(tmp_path)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: send(signal.SIGTERM))
    with pytest.raises(Interrupted):
        trainer.run(numbers_loader(shuffle=True), max_epochs=3)
    resumed = trainer_of(accumulation_steps=2)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(resumed)
    checkpoint.resume()
    resumed.run(numbers_loader(shuffle=True), max_epochs=3)

    assert trainer.state.iteration == 4
    assert torch.equal(weights(resumed), weights(whole))


def test_run_may_return_instead_of_exiting(tmp_path):
    trainer = stoppable(tmp_path, exit=False)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: send(signal.SIGINT))
    state = trainer.run(numbers_loader(), max_epochs=3)

    assert (state.status, state.reason, state.iteration) == ("interrupted", "SIGINT", 2)
    assert trainer.run(numbers_loader(), max_epochs=3).iteration == 9


def test_sigusr1_saves_and_the_run_continues(tmp_path):
    trainer = stoppable(tmp_path)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: send(signal.SIGUSR1))
    state = trainer.run(numbers_loader(), max_epochs=2)

    assert (state.status, state.iteration) == ("completed", 6) and iterations(tmp_path) == [2, 6]


def test_signal_handlers_are_installed_while_it_runs_and_restored_after(tmp_path):
    def mine(*_): ...

    for number in SIGNALS:
        signal.signal(number, mine)
    trainer, during = stoppable(tmp_path), list[Any]()
    assert [signal.getsignal(number) for number in SIGNALS] == [mine] * 4  # attaching touches nothing
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=1), lambda: during.extend(signal.getsignal(number) for number in SIGNALS)
    )
    trainer.run(numbers_loader())
    assert len(during) == 4 and mine not in during
    assert [signal.getsignal(number) for number in SIGNALS] == [mine] * 4
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader())
    assert [signal.getsignal(number) for number in SIGNALS] == [mine] * 4


def test_second_signal_soon_after_the_first_is_the_same_one(tmp_path):
    """Ctrl-C and a launcher's SIGTERM come together."""
    trainer = stoppable(tmp_path)

    @trainer.on(Events.ITERATION_STARTED(once=2))
    def both():
        send(signal.SIGINT)
        send(signal.SIGTERM)

    with pytest.raises(Interrupted) as caught:
        trainer.run(numbers_loader(), max_epochs=3)
    assert caught.value.code == 130 and iterations(tmp_path) == [2]


def test_second_signal_later_forces_the_end(tmp_path):
    trainer = stoppable(tmp_path)

    @trainer.on(Events.ITERATION_STARTED(once=2))
    def twice():
        send(signal.SIGINT)
        time.sleep(0.55)
        send(signal.SIGINT)

    with pytest.raises(Interrupted) as caught:
        trainer.run(numbers_loader(), max_epochs=3)
    assert caught.value.code == 130 and iterations(tmp_path) == []
    assert (trainer.state.status, trainer.state.reason) == ("interrupted", "forced: interrupted by SIGINT")


def test_sigterm_after_the_committed_save_is_ignored(tmp_path):
    trainer, goodbye = stoppable(tmp_path), list[str]()
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: send(signal.SIGTERM))

    @trainer.on(Events.COMPLETED)
    def slow_goodbye():
        time.sleep(0.55)
        send(signal.SIGTERM)
        goodbye.append("said")

    with pytest.raises(Interrupted):
        trainer.run(numbers_loader(), max_epochs=3)
    send(signal.SIGTERM)  # still alive
    assert goodbye == ["said"] and iterations(tmp_path) == [2]


@pytest.mark.parametrize(
    "event",
    [
        Events.EPOCH_COMPLETED(once=2),
        TrainingEvents.RESUME_POINT(once=6),
        TrainingEvents.CHECKPOINT_SAVED(once=1),
        Events.COMPLETED,
    ],
    ids=["last epoch", "last boundary", "last save", "completed"],
)
def test_signal_at_the_end_of_the_run_is_not_lost(event, tmp_path):
    trainer, signalled = stoppable(tmp_path), list[int]()

    def interrupt():
        signalled.append(trainer.state.iteration)
        send(signal.SIGINT)

    trainer.add_event_handler(event, interrupt)
    with pytest.raises(Interrupted):
        trainer.run(numbers_loader(), max_epochs=2)

    assert (trainer.state.status, trainer.state.reason, signalled) == ("interrupted", "SIGINT", [6])
    assert iterations(tmp_path) == [6]


class Blocking:
    """Three batches, then one that comes after half a minute."""

    def __init__(self):
        self.waiting = threading.Event()

    def __iter__(self):
        for _ in range(3):
            yield torch.ones(2, 3), torch.ones(2, 1)
        self.waiting.set()
        time.sleep(30)
        yield torch.ones(2, 3), torch.ones(2, 1)


def signal_when(event):
    def wait_and_send():
        if event.wait(20):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait_and_send)
    thread.start()
    return thread


def test_signal_interrupts_the_wait_for_data(tmp_path):
    trainer, data, started = stoppable(tmp_path), Blocking(), time.monotonic()
    thread = signal_when(data.waiting)
    with pytest.raises(Interrupted):
        trainer.run(data, max_epochs=3)
    thread.join()

    assert time.monotonic() - started < 10
    # the second group was not complete: it counts as not consumed
    assert (trainer.state.iteration, iterations(tmp_path)) == (1, [1])
    loaded = CheckpointStore(tmp_path).load(tmp_path / "iteration_00000001").local
    assert (loaded["data"]["batch"], loaded["trainer"]["micro_batches"]) == (2, 2)


def test_signal_interrupts_the_wait_of_an_evaluation(tmp_path):
    from ignite_engine import create_evaluator

    trainer, data, started = stoppable(tmp_path), Blocking(), time.monotonic()
    evaluator = create_evaluator(trainer.update.model, lambda model, batch: model(batch[0]))
    Evaluation(evaluator, data).attach(trainer, Events.ITERATION_COMPLETED(once=2))
    thread = signal_when(data.waiting)
    with pytest.raises(Interrupted):
        trainer.run(numbers_loader(), max_epochs=3)
    thread.join()

    assert time.monotonic() - started < 10
    assert (trainer.state.iteration, trainer.state.evaluations, iterations(tmp_path)) == (2, 0, [2])


# -- which signals, and whose handlers --------------------------------------------------------------------------------


INT, TERM = signal.SIGINT, signal.SIGTERM
FORWARDED_INT, FORWARDED_TERM = signals.FORWARDED[INT], signals.FORWARDED[TERM]


@pytest.mark.parametrize(
    ("numbers", "forced"),
    [
        ((INT, FORWARDED_INT), False),
        ((FORWARDED_TERM, TERM), False),
        ((INT, FORWARDED_INT, INT), True),
        ((FORWARDED_INT, FORWARDED_INT), True),
        ((INT, FORWARDED_TERM), True),
    ],
)
def test_what_the_parent_forwards_is_no_second_signal(numbers, forced, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "FORCE_AFTER_S", 0.0)
    signals.receive_forwarded()
    trainer = stoppable(tmp_path)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: [send(number) for number in numbers])
    with pytest.raises(Interrupted):
        trainer.run(numbers_loader(), max_epochs=3)

    assert (iterations(tmp_path), str(trainer.state.reason).startswith("forced")) == ([] if forced else [2], forced)


def test_sighup_stops_the_run_as_sigterm_does(tmp_path):
    trainer = stoppable(tmp_path)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: send(signal.SIGHUP))
    with pytest.raises(Interrupted) as caught:
        trainer.run(numbers_loader(), max_epochs=3)

    assert caught.value.code == 128 + signal.SIGTERM and iterations(tmp_path) == [2]
    assert (trainer.state.status, trainer.state.reason) == ("interrupted", "SIGHUP")


def test_sighup_that_nohup_ignores_stays_ignored(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    trainer = stoppable(tmp_path)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: send(signal.SIGHUP))

    assert trainer.run(numbers_loader(), max_epochs=1).status == "completed"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_in_another_thread_it_is_one_line_and_the_run_completes(tmp_path, caplog):
    trainer, before = stoppable(tmp_path), [signal.getsignal(number) for number in SIGNALS]
    during = list[Any]()
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=1), lambda: during.extend(signal.getsignal(number) for number in SIGNALS)
    )
    thread = threading.Thread(target=trainer.run, args=(numbers_loader(),))
    thread.start()
    thread.join()

    assert (trainer.state.status, trainer.state.iteration, iterations(tmp_path)) == ("completed", 3, [3])
    assert during == before
    assert [record.getMessage() for record in caplog.records if "GracefulStop" in record.getMessage()] == [
        "GracefulStop has no effect: signals can only be handled in the main thread, and run() was called in another "
        f"one ({thread.name}). The run continues without it; stop it with trainer.request_stop(reason)."
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_users_own_handler_is_called_once_when_the_run_has_ended(number, tmp_path):
    called = list[Any]()
    trainer = stoppable(tmp_path)
    signal.signal(number, lambda *arguments: called.append((arguments, trainer.state.status, iterations(tmp_path))))

    @trainer.on(Events.ITERATION_STARTED(once=2))
    def twice():
        send(number)
        send(number)

    trainer.add_event_handler(Events.COMPLETED, lambda: called.append("COMPLETED"))
    with pytest.raises(Interrupted):
        trainer.run(numbers_loader(), max_epochs=3)

    assert called == ["COMPLETED", ((number, None), "interrupted", [2])]


def test_users_own_handler_is_called_when_the_run_returns_too(tmp_path):
    called = list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    trainer = stoppable(tmp_path, exit=False)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: send(signal.SIGTERM))
    trainer.run(numbers_loader(), max_epochs=3)
    assert called == [signal.SIGTERM]
    trainer.run(numbers_loader(), max_epochs=3)

    assert called == [signal.SIGTERM], "the second run had no signal"


def test_handler_that_python_did_not_install_becomes_the_default_one(tmp_path):
    """In an embedded interpreter ``signal.signal`` returns None for it, and does not accept None."""
    handler = GracefulStop()
    handler._before = {signal.SIGTERM: None}
    handler._restore(trainer_of())

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_interactive_session_can_be_interrupted_again(tmp_path, monkeypatch):
    """Python's prompt, IPython and notebooks, which have ``sys.ps1``, survive ``Interrupted``."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trainer, before = stoppable(tmp_path), [signal.getsignal(number) for number in SIGNALS]
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: send(signal.SIGINT))
    with pytest.raises(Interrupted):
        trainer.run(numbers_loader(), max_epochs=3)

    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.row("G1")
def test_interactive_session_gets_the_state_back(tmp_path, monkeypatch):
    """A notebook would show SystemExit as an error, and Python's prompt would end with it."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trainer = stoppable(tmp_path, exit=None)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: send(signal.SIGINT))
    state = trainer.run(numbers_loader(), max_epochs=3)

    assert (state.status, state.reason, state.iteration) == ("interrupted", "SIGINT", 2)


def test_second_signal_in_an_interactive_session_is_a_keyboard_interrupt(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(signals, "FORCE_AFTER_S", 0.0)
    trainer = stoppable(tmp_path, exit=None)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: [send(signal.SIGINT), send(signal.SIGINT)])
    with pytest.raises(KeyboardInterrupt):
        trainer.run(numbers_loader(), max_epochs=3)


# -- what is logged ---------------------------------------------------------------------------------------------------


def stop_lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.endswith("graceful_stop")]


def test_signal_is_one_line_at_once(tmp_path, caplog):
    trainer = stoppable(tmp_path)
    seen = list[list[str]]()

    @trainer.on(Events.ITERATION_STARTED(once=2))
    def interrupt():
        send(signal.SIGINT)
        send(signal.SIGINT)
        deadline = time.monotonic() + 5
        while not stop_lines(caplog) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(stop_lines(caplog))

    with pytest.raises(Interrupted):
        trainer.run(numbers_loader(), max_epochs=3)

    line = (
        "SIGINT at iteration 2: the run stops at the next step boundary, where Checkpoint saves. Another signal ends "
        "it at once, without a save."
    )
    assert seen == [[line]], "while the update is still running"
    assert stop_lines(caplog) == [line]


def test_no_thread_is_left(tmp_path):
    before = threading.active_count()
    trainer = stoppable(tmp_path)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader())

    assert threading.active_count() == before


# -- as a program -----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time, torch
from ignite.engine import Events
from ignite_engine.handlers import Checkpoint, GracefulStop
from tests.kit.tiny import numbers_loader, trainer_of, weights

trainer = trainer_of()
checkpoint = Checkpoint(sys.argv[1])
checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100000))
GracefulStop().attach(trainer)
checkpoint.resume()

@trainer.on(Events.ITERATION_COMPLETED)
def report():
    if sys.argv[2] == "slow":
        print("iteration", trainer.state.iteration, flush=True)
        time.sleep(0.05)

trainer.run(numbers_loader(40, 2, shuffle=True, num_workers=2), max_epochs=2)
print("weights", weights(trainer).tolist())
"""


def start(directory, speed):
    return program(ROOT, SCRIPT, str(directory), speed)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "code"),
    [
        # slow: test_resume_matrix.py has workers of every kind
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 143),
    ],
)
def test_program_with_loader_workers_saves_and_exits_with_the_signals_code(number, code, tmp_path):
    """Ctrl-C and a closed terminal signal the whole group: the loader's workers get it too."""
    process = start(tmp_path / "cut", "slow")
    deadline = time.monotonic() + 60
    while "iteration 5" not in process.output.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, number) if number is not signal.SIGTERM else process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    (saved,) = iterations(tmp_path / "cut")
    assert 5 <= saved < 40

    again, whole = start(tmp_path / "cut", "fast"), start(tmp_path / "whole", "fast")
    ends = [process.communicate(timeout=60)[0].splitlines()[-1] for process in (again, whole)]
    assert ends[0] == ends[1] and ends[0].startswith("weights [")


def _one_of_two_ranks(rank, folder):

    def leave(number, frame):
        sys.exit(5)

    signal.signal(signal.SIGTERM, leave)
    trainer = Trainer(lambda engine, batch: time.sleep(0.01))
    GracefulStop().attach(trainer)
    if rank == 1:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: send(signal.SIGTERM))
        trainer.add_event_handler(Events.COMPLETED, lambda: time.sleep(0.5))
    try:
        trainer.run(range(1000), max_epochs=1)
    except SystemExit as end:
        (Path(folder) / f"{rank}.txt").write_text(str(end.code))
    os._exit(0)  # not together: the first one would take the other's connection down


@pytest.mark.slow
@pytest.mark.distributed
def test_users_handler_may_exit_on_one_rank_when_all_have_saved(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)

    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["143", "5"]
