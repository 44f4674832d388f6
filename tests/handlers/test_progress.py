"""Progress: one line on a terminal, few lines elsewhere, rank 0 only."""

import fcntl
import logging
import os
import pty
import re
import struct
import sys
import termios
import time
import warnings
from contextlib import contextmanager, redirect_stderr

import pytest
from ignite.engine import Events

from ignite_engine import Trainer
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.handlers import Checkpoint
from ignite_engine.handlers import progress as module
from ignite_engine.handlers.progress import Progress
from tests.ranks.forkserver import on_ranks


@contextmanager
def terminal(columns):
    """stderr is a real terminal for a while; the value reads what was drawn on it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def drawn():
        os.write(slave, b"\0")  # the kernel hands it over when it likes: read up to this mark
        text = b""
        while not text.endswith(b"\0"):
            text += os.read(master, 65536)
        return text[:-1].decode()

    before = sys.stderr  # not in a fixture: pytest sets it again before the test itself
    with os.fdopen(slave, "w") as stream:
        sys.stderr = stream
        try:
            yield drawn
        finally:
            sys.stderr = before
    os.close(master)


def trainer_of(seconds=0.0):
    trainer = Trainer(lambda engine, batch: time.sleep(seconds))
    Progress().attach(trainer)
    return trainer


@pytest.mark.row("A10")
def test_on_a_terminal_one_line_is_redrawn_at_most_ten_times_a_second():
    with terminal(100) as drawn:
        started = time.perf_counter()
        trainer_of(0.01).run(range(20), max_epochs=2)
        elapsed = time.perf_counter() - started
        text = drawn().replace("\r\n", "\n")  # as a terminal translates it
    assert text.count("\n") == 1 and text.endswith("\n")  # one line, left standing at the end
    drawings = text.split("\r")[1:]
    assert 3 <= len(drawings) <= elapsed / 0.1 + 1
    assert "epoch 2/2  iter 40/40 [########################] 100%" in drawings[-1]
    assert all(re.search(r"ETA \d+:\d\d", drawing) for drawing in drawings)


def test_on_a_terminal_no_line_is_wider_than_it():
    with terminal(20) as drawn:
        trainer_of().run(range(3), max_epochs=1)
        drawings = [drawing.replace("\x1b[K", "").strip() for drawing in drawn().split("\r")]
    assert max(len(drawing) for drawing in drawings) == 19


def test_on_a_terminal_the_line_is_cleared_before_the_loggers_print():
    trainer = trainer_of(0.11)
    printed = []

    def log(trainer):
        printed.append(drawn())

    log.phase = Phase.LOG
    trainer.add_event_handler(TrainingEvents.METRICS_READY, log)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.state.metrics.update(loss=0.123456))
    with terminal(100) as drawn:
        trainer.run(range(3), max_epochs=1)
        rest = drawn()
    assert "iter 2/3" in printed[0] and printed[0].endswith("\r\x1b[K")
    assert "loss 0.1235" in rest


def test_elsewhere_each_tenth_of_the_run_is_one_plain_line(capsys, monkeypatch):
    assert module.LINES_APART_S == 10.0
    monkeypatch.setattr(module, "LINES_APART_S", 0.0)
    trainer_of().run(range(125), max_epochs=2)
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split("iter ")[1].split("/")[0]) for line in lines] == list(range(25, 251, 25))
    assert lines[-1].startswith("epoch 2/2  iter 250/250 100%  elapsed 0:0")
    assert not any(sign in line for line in lines for sign in "\r\x1b#")


def test_elsewhere_a_line_comes_after_a_while_however_slow_the_run_is(capsys, monkeypatch):
    assert module.LINE_S == 30.0
    monkeypatch.setattr(module, "LINE_S", 0.05)
    trainer = trainer_of(0.02)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=12), trainer.terminate)
    trainer.run(range(1000), max_epochs=1)
    assert 3 <= len(capsys.readouterr().err.splitlines()) <= 6  # 12 iterations are less than a tenth


def test_data_without_a_length_is_counted_without_a_total(capsys):
    trainer_of().run(iter(range(7)), max_epochs=1)
    assert re.fullmatch(r"epoch 1/1  iter 7/7 100%  elapsed 0:00  ETA 0:00\n", capsys.readouterr().err)


def test_the_time_left_is_computed_from_the_speed_of_this_process(capsys):
    handler, trainer = Progress(), Trainer(lambda engine, batch: None)
    handler.attach(trainer)
    trainer.state.iteration, trainer.state.max_iters = 9_000, 10_000  # as a resume leaves them
    handler._start(trainer)
    trainer.state.iteration = 9_010
    handler._print(trainer, handler._started_at + 40.0)
    assert "elapsed 0:40  ETA 1:06:00" in capsys.readouterr().err  # 990 iterations at 4 s


@pytest.mark.row("A10")
def test_on_a_terminal_it_shows_the_iterations_of_this_process_in_a_second():
    handler, trainer = Progress(), Trainer(lambda engine, batch: None)
    handler.attach(trainer)
    trainer.state.iteration, trainer.state.max_iters = 9_000, 10_000  # as a resume leaves them
    with terminal(100) as drawn:
        handler._start(trainer)
        handler._print(trainer, handler._started_at)
        before = drawn()
        trainer.state.iteration = 9_010
        handler._print(trainer, handler._started_at + 4.0)
        after = drawn()
        trainer._call_at_end()
    assert "it/s" not in before and "ETA 6:36  2.50 it/s" in after


def test_elsewhere_a_short_run_is_its_last_line_only(capsys):
    trainer_of().run(range(125), max_epochs=2)
    assert [line[:38] for line in capsys.readouterr().err.splitlines()] == ["epoch 2/2  iter 250/250 100%  elapsed "]


def test_a_run_that_trains_nothing_shows_nothing(tmp_path, capsys):
    shown = []
    for _ in range(2):
        trainer = trainer_of()
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(range(3), max_epochs=1)
        shown.append((trainer.state.iteration, "iter 3/3" in capsys.readouterr().err))
    assert shown == [(3, True), (3, False)]


def test_elsewhere_a_log_point_is_a_sign_of_life(capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_S", 0.2)
    trainer = trainer_of(0.02)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(a=1.0))
    trainer.run(range(25), max_epochs=1)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_on_a_terminal_it_shows_the_values_of_the_console_that_fit():
    def drawing(columns, keys=None):
        trainer = Trainer(lambda engine, batch: None)
        Progress(keys).attach(trainer)
        values = {"memory/peak_mib": 1.0, "val/loss": 0.25, "loss": 0.123456, "throughput/samples_per_s": 4540.0}
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.state.metrics.update(values))
        with terminal(columns) as drawn:
            trainer.run(range(3), max_epochs=1)
            rest = drawn().split("\r")[-2].removesuffix("\x1b[K").split("ETA 0:00")[1]
            return re.sub(r"^  [\d.]+k? it/s", "", rest)

    assert drawing(120) == "  loss 0.1235  val/loss 0.25  samples/s 4.54k"
    assert drawing(80) == "  loss 0.1235"  # before it come the iterations per second
    assert drawing(120, ["rate", "loss"]) == "  samples/s 4.54k  loss 0.1235"


def test_on_a_terminal_a_logged_message_stands_alone(monkeypatch):
    """Also where logging is not set up, and after the run the handlers are as before."""
    logger = logging.getLogger("of.a.test")
    for last in (False, True):
        trainer = trainer_of(0.11)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: logger.warning("careful"))
        with terminal(80) as drawn:
            handler = logging.StreamHandler(sys.stderr)
            with monkeypatch.context() as patch:
                patch.setattr(logging.getLogger(), "handlers", [] if last else [handler])
                trainer.run(range(3), max_epochs=1)
            text = drawn().replace("\r\n", "\n")
        assert "\r\x1b[Kcareful\n" in text and text.count("\n") == 2
        assert handler.filters == [] and logging.lastResort is not None and logging.lastResort.filters == []


def test_it_attaches_to_any_event(capsys, monkeypatch):
    monkeypatch.setattr(module, "LINES_APART_S", 0.0)
    trainer = Trainer(lambda engine, batch: None)
    Progress().attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(range(5), max_epochs=3)
    assert len(capsys.readouterr().err.splitlines()) == 3


def _one_of_two_ranks(rank, folder):
    with open(f"{folder}/{rank}.txt", "w") as stream, redirect_stderr(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own would be on stderr too
        trainer_of().run([0, 1], max_epochs=1)


@pytest.mark.distributed
def test_only_rank_0_shows_it(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    assert "iter 2/2" in (tmp_path / "0.txt").read_text()
    assert (tmp_path / "1.txt").read_text() == ""


def test_pipe_that_nobody_reads_any_more_ends_no_training(monkeypatch, caplog):
    monkeypatch.setattr(module, "LINES_APART_S", 0.0)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        with redirect_stderr(stream):
            assert trainer_of().run(range(50)).iteration == 50
        with pytest.raises(BrokenPipeError):  # what was not written is still in the buffer
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    (line,) = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert line == "Progress is no longer shown, as stderr is gone: [Errno 32] Broken pipe. Training continues."
