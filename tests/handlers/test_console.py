"""What a person watches: the console's lines, and the progress of a run on a terminal."""

import fcntl
import logging
import os
import pty
import re
import struct
import sys
import termios
from contextlib import contextmanager, redirect_stdout

import pytest
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.events import Phase
from ignite_engine.handlers import Checkpoint, MetricLogger, Progress
from tests.kit.processes import ranks


@contextmanager
def terminal(columns):
    """A real terminal: a stream to it, and a function that reads what was drawn."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def drawn():
        os.write(slave, b"\0")  # the kernel hands it over when it likes: read up to this mark
        text = b""
        while not text.endswith(b"\0"):
            text += os.read(master, 65536)
        return text[:-1].decode().replace("\r\n", "\n")  # as a terminal translates it

    with os.fdopen(slave, "w") as stream:
        yield stream, drawn
    os.close(master)


# -- the console -------------------------------------------------------------------------------------------------------


NOISE = {"memory/peak_mib": 3.0, "grad_norm": 1.0, "lr/head": 0.1, "throughput/steps_per_s": 1.0, "time/step_ms": 2.0}
VALUES = {"loss": 0.5, "val/a": 1.0, "val/b": 2.0, "throughput/samples_per_s": 12345.6, "lr": 0.00025, "table": [1.0]}


@pytest.mark.row("F1")
@pytest.mark.parametrize(
    ("console", "expected"),
    [
        (True, "loss 0.5  val/a 1  val/b 2  lr 0.00025  samples/s 12.35k"),
        (["rate", "grad_norm", "val/*", "never", "loss"], "samples/s 12.35k  grad_norm 1  val/a 1  val/b 2  loss 0.5"),
        (["never"], None),
        (False, None),
    ],
)
def test_console_prints_what_matters_at_each_log_point(console, expected, capsys):
    trainer = Trainer(lambda engine, batch: None)
    event = Events.ITERATION_COMPLETED(every=2)
    trainer.add_event_handler(event, lambda: trainer.state.metrics.update(NOISE | VALUES))
    MetricLogger(console=console).attach(trainer, event)
    trainer.run([1, 2, 3, 4])

    lines = [f"epoch 1  iter {iteration}  {expected}" for iteration in (2, 4) if expected is not None]
    assert capsys.readouterr().out.splitlines() == lines


# -- progress on a terminal --------------------------------------------------------------------------------------------


@contextmanager
def on_a_terminal(columns):
    """stderr is one for a while; the value reads what was drawn on it."""
    before = sys.stderr  # not in a fixture: pytest sets it again before the test itself
    with terminal(columns) as (stream, drawn):
        sys.stderr = stream
        try:
            yield drawn
        finally:
            sys.stderr = before


def shown(clock=None, seconds=0.0, event=None, keys=None):
    """A trainer with progress, each of whose iterations takes so long."""
    trainer = Trainer(lambda engine, batch: clock and clock.move(seconds))
    Progress(keys).attach(trainer, *([event] if event else []))
    return trainer


@pytest.mark.row("A10")
def test_on_a_terminal_one_line_is_redrawn_at_most_ten_times_a_second(clock):
    with on_a_terminal(100) as drawn:
        shown(clock, 0.0101).run(range(20), max_epochs=2)
        text = drawn()
    drawings = text.split("\r")[1:]

    assert text.count("\n") == 1 and text.endswith("\n")  # one line, left standing at the end
    assert [int(re.search(r"iter (\d+)/", drawing)[1]) for drawing in drawings] == [10, 20, 30, 40, 40]
    assert "epoch 2/2  iter 40/40 [####################] 100%" in drawings[-1]
    assert all(re.search(r"ETA 0:00  99 it/s", drawing) for drawing in drawings)


def test_on_a_terminal_no_line_is_wider_than_it():
    with on_a_terminal(20) as drawn:
        shown().run(range(3), max_epochs=1)
        drawings = [drawing.replace("\x1b[K", "").strip() for drawing in drawn().split("\r")]

    assert max(len(drawing) for drawing in drawings) == 19


@pytest.mark.parametrize(
    ("columns", "keys", "values"),
    [
        (140, None, "  loss 0.1235  val/loss 0.25  samples/s 4540"),
        (100, None, "  loss 0.1235"),
        (140, ["rate", "loss"], "  samples/s 4540  loss 0.1235"),
    ],
)
def test_on_a_terminal_it_shows_the_values_of_the_console_that_fit(columns, keys, values, clock):
    trainer = shown(clock, 1.0, keys=keys)
    metrics = {"memory/peak_mib": 1.0, "val/loss": 0.25, "loss": 0.123456, "throughput/samples_per_s": 4540.0}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.state.metrics.update(metrics))
    with on_a_terminal(columns) as drawn:
        trainer.run(range(3), max_epochs=1)
        last = drawn().split("\r")[-1].removesuffix("\x1b[K\n")

    assert last.split(" it/s")[1] == values


def test_on_a_terminal_the_line_is_cleared_before_the_loggers_print(clock):
    trainer, before = shown(clock, 0.11), []

    def log(trainer):
        before.append(drawn())

    log.phase = Phase.LOG
    trainer.add_event_handler(TrainingEvents.METRICS_READY, log)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.state.metrics.update(loss=0.123456))
    with on_a_terminal(100) as drawn:
        trainer.run(range(3), max_epochs=1)
        rest = drawn()

    assert "iter 2/3" in before[0] and before[0].endswith("\r\x1b[K") and "loss 0.1235" in rest


@pytest.mark.parametrize("logging_is_set_up", [True, False])
def test_on_a_terminal_a_logged_message_stands_alone(logging_is_set_up, clock, monkeypatch):
    """And after the run the handlers of logging are as before."""
    trainer, logger = shown(clock, 0.11), logging.getLogger("of.a.test")
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: logger.warning("careful"))
    with on_a_terminal(80) as drawn:
        handler = logging.StreamHandler(sys.stderr)
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler] if logging_is_set_up else [])
        trainer.run(range(3), max_epochs=1)
        text = drawn()

    assert "\r\x1b[Kcareful\n" in text and text.count("\n") == 2
    assert handler.filters == [] and logging.lastResort.filters == []


def test_the_time_left_is_that_of_the_speed_of_this_process(clock, tmp_path):
    for seconds, stop in ((1.0, 10), (4.0, 14)):
        trainer = shown(clock, seconds)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda: trainer.request_stop("enough"))  # noqa: B023
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        with on_a_terminal(100) as drawn:
            trainer.run(range(20), max_epochs=1)
            text = drawn()

    assert "iter 14/20 [##############......] 70%  elapsed 0:16  ETA 0:24" in text


# -- elsewhere ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("A10")
def test_elsewhere_progress_is_quiet(clock, capsys):
    shown(clock, 20.0).run(range(125), max_epochs=2)
    assert capsys.readouterr().err == ""


def test_only_rank_0_shows_it():
    def work(rank):
        with on_a_terminal(100) as drawn:
            shown().run([0, 1], max_epochs=1)
            return drawn()

    first, second = ranks(2, work)
    assert "iter 2/2" in first and second == ""


def test_pipe_that_nobody_reads_any_more_ends_no_training(caplog):
    trainer = Trainer(lambda engine, batch: 1.0)
    MetricLogger().attach(trainer)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        with redirect_stdout(stream):
            assert trainer.run(range(50)).iteration == 50
        with pytest.raises(BrokenPipeError):  # what was not written is still in the buffer
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    (line,) = [record.getMessage() for record in caplog.records if "shown" in record.getMessage()]
    assert "Broken pipe" in line and "continues" in line
