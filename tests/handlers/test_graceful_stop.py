"""A signal stops a run at a step boundary, saved, with the exit code of the signal."""

import contextlib
import os
import signal
import sys
import threading
import time

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Interrupted, TrainingEvents, create_evaluator
from ignite_engine.handlers import Checkpoint, Evaluation, GracefulStop
from ignite_engine.ranks import signals
from tests.kit import saved
from tests.kit.processes import start, wait_until
from tests.kit.tiny import numbers_loader, trainer_of, weights

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
INT, TERM, HUP, FORCE = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signals.FORCE
SECOND = Events.ITERATION_STARTED(once=2)


@pytest.fixture
def counted_by_the_parent(monkeypatch):
    """This process is as a rank that ``Parallel`` has started."""
    monkeypatch.setattr(signals, "parent_counts", True)
    before = signal.getsignal(FORCE)
    yield
    signal.signal(FORCE, before)  # after a stop it stays ignored, which the other tests must not inherit


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def send(*numbers):
    """To this process; the handlers have run when this returns."""
    for number in numbers:
        signal.raise_signal(number)


def stoppable(directory, *, exit=True):
    trainer = trainer_of(accumulation_steps=2)
    Checkpoint(directory).attach(trainer, Events.ITERATION_COMPLETED(every=1000))
    GracefulStop(exit=exit).attach(trainer)
    return trainer


def stopped(trainer, data=None):
    """The exit code with which the run ends."""
    with pytest.raises(Interrupted) as caught:
        trainer.run(numbers_loader() if data is None else data, max_epochs=3)
    assert trainer.state.status == "interrupted"
    return caught.value.code


@pytest.mark.parametrize(("number", "code"), [(INT, 130), (TERM, 143), (HUP, 143)])
def test_signal_ends_the_run_at_a_saved_step_boundary(number, code, tmp_path):
    trainer, fired = stoppable(tmp_path), []
    # in the middle of the second update
    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED(once=3), lambda: send(number))
    trainer.add_event_handler(Events.COMPLETED, lambda: fired.append("COMPLETED"))

    assert stopped(trainer) == code and fired == ["COMPLETED"]
    assert (trainer.state.iteration, trainer.state.micro_batches, trainer.state.reason) == (2, 4, number.name)
    assert saved.iterations(tmp_path) == [2]


def test_sigusr1_saves_and_the_run_continues(tmp_path):
    trainer = stoppable(tmp_path)
    trainer.add_event_handler(SECOND, lambda: send(signal.SIGUSR1))
    state = trainer.run(numbers_loader(), max_epochs=2)
    assert (state.status, state.iteration) == ("completed", 6) and saved.iterations(tmp_path) == [2, 6]


@pytest.mark.parametrize(
    "event",
    [
        Events.EPOCH_COMPLETED(once=3),
        TrainingEvents.RESUME_POINT(once=9),
        TrainingEvents.CHECKPOINT_SAVED(once=1),
        Events.COMPLETED,
    ],
    ids=["last epoch", "last boundary", "last save", "completed"],
)
def test_signal_at_the_end_of_the_run_is_not_lost(event, tmp_path):
    trainer = stoppable(tmp_path)
    trainer.add_event_handler(event, lambda: send(INT))
    assert stopped(trainer) == 130 and (trainer.state.reason, trainer.state.iteration) == ("SIGINT", 9)
    assert saved.iterations(tmp_path) == [9]


class Blocking:
    """Three batches, then one that comes after half a minute; a signal to this process while it is waited for."""

    def __iter__(self):
        for _ in range(3):
            yield torch.ones(2, 3), torch.ones(2, 1)
        threading.Timer(0.05, os.kill, (os.getpid(), TERM)).start()
        time.sleep(30)
        yield torch.ones(2, 3), torch.ones(2, 1)


@pytest.mark.parametrize("evaluates", [False, True])
def test_signal_interrupts_the_wait_for_data(evaluates, tmp_path):
    trainer, began = stoppable(tmp_path), time.monotonic()
    if evaluates:
        evaluator = create_evaluator(trainer.update.model, lambda model, batch: model(batch[0]))
        Evaluation(evaluator, Blocking()).attach(trainer, Events.ITERATION_COMPLETED(once=1))
    stopped(trainer, numbers_loader() if evaluates else Blocking())

    assert time.monotonic() - began < 20
    # the second group was not complete: it counts as not consumed
    assert (trainer.state.iteration, trainer.state.evaluations, saved.iterations(tmp_path)) == (1, 0, [1])
    parts = saved.parts(tmp_path)
    assert (parts["data"]["batch"], parts["trainer"]["micro_batches"]) == (2, 2)


def after_signals(directory, clock, numbers, after_s):
    trainer = stoppable(directory)

    def send_all():
        for number in numbers:
            send(number)
            clock.move(after_s)

    trainer.add_event_handler(SECOND, send_all)
    stopped(trainer)
    return saved.iterations(directory), trainer.state.reason.startswith("forced")


@pytest.mark.parametrize(
    ("numbers", "after_s", "forced"),
    [
        ((INT, TERM), 0.0, False),  # Ctrl-C and a launcher's SIGTERM come together
        ((INT, INT), 0.55, True),
    ],
)
def test_a_second_signal_later_forces_the_end(numbers, after_s, forced, tmp_path, clock):
    assert after_signals(tmp_path, clock, numbers, after_s) == ([] if forced else [2], forced)


@pytest.mark.parametrize(("numbers", "forced"), [((INT, INT, TERM), False), ((INT, FORCE), True)])
def test_a_rank_is_forced_by_its_parent_alone(numbers, forced, tmp_path, clock, counted_by_the_parent):
    """What comes later may be the first one, passed on by the parent, while the main thread was in a long operation."""
    assert after_signals(tmp_path, clock, numbers, 5.0) == ([] if forced else [2], forced)


def test_sigterm_after_the_committed_save_is_ignored(tmp_path, clock):
    """Launchers send it to processes that are still exiting."""
    trainer, goodbye = stoppable(tmp_path), []
    trainer.add_event_handler(SECOND, lambda: send(TERM))

    @trainer.on(Events.COMPLETED)
    def slow_goodbye():
        clock.move(0.55)
        send(TERM)
        goodbye.append("said")

    stopped(trainer)
    send(TERM)  # still alive
    assert goodbye == ["said"] and saved.iterations(tmp_path) == [2]


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_installed_while_it_runs_and_restored_after(fails, tmp_path):
    def mine(*_): ...

    for number in SIGNALS:
        signal.signal(number, mine)
    trainer, during, threads = stoppable(tmp_path), [], threading.active_count()
    assert handlers() == [mine] * 4  # attaching touches nothing
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: during.extend(handlers()))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / (not fails))
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        trainer.run(numbers_loader())
    assert len(during) == 4 and mine not in during
    assert handlers() == [mine] * 4 and threading.active_count() == threads


def test_sighup_that_nohup_ignores_stays_ignored(tmp_path):
    signal.signal(HUP, signal.SIG_IGN)
    trainer = stoppable(tmp_path)
    trainer.add_event_handler(SECOND, lambda: send(HUP))
    assert trainer.run(numbers_loader(), max_epochs=1).status == "completed"
    assert signal.getsignal(HUP) is signal.SIG_IGN


def test_in_another_thread_it_is_one_line_and_the_run_completes(tmp_path, caplog):
    trainer, before, during = stoppable(tmp_path), handlers(), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: during.extend(handlers()))
    thread = threading.Thread(target=trainer.run, args=(numbers_loader(),))
    thread.start()
    thread.join()

    assert (trainer.state.status, during) == ("completed", before)
    (line,) = [line for line in caplog.messages if "GracefulStop" in line]
    assert "main thread" in line and thread.name in line


@pytest.mark.row("G1")
@pytest.mark.parametrize(("exit", "ends"), [(None, None), (True, Interrupted)])
def test_an_interactive_session_goes_on(exit, ends, tmp_path, monkeypatch):
    """Python's prompt, IPython and notebooks, which have ``sys.ps1``: ``Interrupted`` would end or clutter them."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trainer, before = stoppable(tmp_path, exit=exit), handlers()
    trainer.add_event_handler(SECOND, lambda: send(INT))
    if ends is None:
        trainer.run(numbers_loader(), max_epochs=3)
    else:
        stopped(trainer)
    state = trainer.state
    assert (state.status, state.reason, state.iteration) == ("interrupted", "SIGINT", 2) and handlers() == before


def test_signal_is_one_line_at_once(tmp_path, capfd):
    trainer, said = stoppable(tmp_path), []
    # while the update is running
    trainer.add_event_handler(SECOND, lambda: (send(INT, INT), said.extend(capfd.readouterr().err.splitlines())))
    stopped(trainer)
    (line,) = [line for line in said if line.startswith("SIGINT at iteration 2")]
    assert "without a save" in line


def a_program(folder, *, waits):
    trainer, checkpoint = trainer_of(), Checkpoint(folder)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100_000))
    GracefulStop().attach(trainer)
    checkpoint.resume()

    @trainer.on(Events.ITERATION_COMPLETED)
    def wait():
        if waits and trainer.state.iteration >= 3:
            (folder / "started").touch()
            time.sleep(0.02)

    trainer.run(numbers_loader(40, 2, shuffle=True, num_workers=2), max_epochs=2)
    return weights(trainer)


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(INT, 130, marks=pytest.mark.nightly), (TERM, 143), pytest.param(HUP, 143, marks=pytest.mark.nightly)],
)
def test_program_with_loader_workers_saves_and_exits_with_the_signals_code(number, code, tmp_path):
    """Ctrl-C and a closed terminal signal the whole group: the loader's workers get it too."""
    process = start(lambda: a_program(tmp_path, waits=True))
    wait_until((tmp_path / "started").exists, process)
    os.kill(process.pid, number) if number is TERM else process.signal(number)
    assert process.wait() == code and "Traceback" not in process.said()
    assert 3 <= saved.iterations(tmp_path)[0] < 40

    ends = [start(lambda folder=folder: a_program(folder, waits=False)) for folder in (tmp_path, tmp_path / "whole")]
    assert torch.equal(*(end.answer() for end in ends))
