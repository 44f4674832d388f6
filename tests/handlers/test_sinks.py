"""One JSON object per iteration, whatever happened before; and what fails in a sink stops no training."""

import fcntl
import io
import json
import logging
import os
import pty
import resource
import signal
import struct
import termios
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer
from ignite_engine.handlers import Checkpoint, ConsoleSink, JSONLSink, MetricLogger
from tests.faults.commands import program
from tests.kit.faults import in_child
from tests.kit.tiny import numbers_loader, trainer_of


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_on_disk_when_it_is_written(tmp_path):
    sink = JSONLSink(tmp_path / "new" / "metrics.jsonl")
    sink.write(1, {"epoch": 1, "b": 0.1 + 0.2, "a": 2})

    assert (tmp_path / "new" / "metrics.jsonl").read_text() == (
        '{"iteration": 1, "epoch": 1, "a": 2, "b": 0.30000000000000004}\n'
    )


@pytest.mark.row("F1")
def test_values_of_one_iteration_share_a_line(tmp_path):
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"a": 1.0})
    sink.write(2, {"a": 2.0, "long name": 5.0})
    sink.write(2, {"a": 3.0})
    sink.write(3, {"a": 4.0})

    assert lines(tmp_path / "metrics.jsonl") == [
        {"iteration": 1, "a": 1.0},
        {"iteration": 2, "a": 3.0, "long name": 5.0},
        {"iteration": 3, "a": 4.0},
    ]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (torch.tensor(float("nan")), "nan"),
        (torch.tensor(1.5), 1.5),
        (True, True),
        ("word", "word"),
    ],
)
def test_every_line_is_strict_json(value, written, tmp_path):
    JSONLSink(tmp_path / "metrics.jsonl").write(1, {"a": value})

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["a"] == written and type(line["a"]) is type(written)


def test_file_is_cut_back_to_the_saved_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    sink.write(1, {"a": 1.0})
    sink.write(2, {"a": 2.0})
    saved = sink.state_dict()
    sink.write(2, {"joined": 9.0})
    sink.write(3, {"a": 3.0})
    with path.open("a") as file:
        file.write('{"iteration": 4, "a"')  # killed while writing
    resumed = JSONLSink(path)
    resumed.load_state_dict(saved)
    resumed.write(3, {"a": 30.0})

    assert lines(path) == [{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 2.0}, {"iteration": 3, "a": 30.0}]


def test_checkpoint_from_before_the_first_line_empties_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    saved = sink.state_dict()
    sink.write(1, {"a": 1.0})
    resumed = JSONLSink(path)
    resumed.load_state_dict(saved)

    assert path.read_text() == ""


def test_resuming_without_the_file_leaves_no_hole(tmp_path):
    sink = JSONLSink(tmp_path / "old.jsonl")
    sink.write(1, {"a": 1.0})
    sink.write(2, {"a": 2.0})
    resumed = JSONLSink(tmp_path / "new.jsonl")
    resumed.load_state_dict(sink.state_dict())
    resumed.write(3, {"a": 3.0})

    assert lines(tmp_path / "new.jsonl") == [{"iteration": 2, "a": 2.0}, {"iteration": 3, "a": 3.0}]


def test_run_that_starts_over_in_the_same_file_doubles_no_line(tmp_path):
    """Killed before its first checkpoint, the same command starts at iteration 1 again."""
    path = tmp_path / "metrics.jsonl"
    first = JSONLSink(path)
    for iteration in (1, 2, 3):
        first.write(iteration, {"a": float(iteration)})
    with path.open("a") as file:
        file.write('{"iterat')
    second = JSONLSink(path)
    second.write(1, {"a": 10.0})
    second.write(2, {"a": 20.0})

    assert lines(path) == [{"iteration": 1, "a": 10.0}, {"iteration": 2, "a": 20.0}]


def test_second_run_of_one_process_doubles_no_line(tmp_path):
    trainer = trainer_of()
    MetricLogger(tmp_path, console=False).attach(trainer)
    trainer.run(numbers_loader(6), max_epochs=1)
    first = lines(tmp_path / "metrics.jsonl")
    trainer.run(numbers_loader(6), max_epochs=1)
    second = lines(tmp_path / "metrics.jsonl")

    assert [line["iteration"] for line in first] == [line["iteration"] for line in second] == [1, 2, 3]
    assert all(before["loss"] != after["loss"] for before, after in zip(first, second, strict=True))


def test_run_that_continues_without_a_saved_position_keeps_the_lines_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JSONLSink(path)
    for iteration in (1, 2, 3):
        first.write(iteration, {"a": float(iteration)})
    JSONLSink(path).write(3, {"b": 1.0})

    assert lines(path) == [{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 2.0}, {"iteration": 3, "b": 1.0}]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("ignite.distributed.get_rank", lambda: 1)
    stream = io.StringIO()
    JSONLSink(tmp_path / "metrics.jsonl").write(1, {"a": 1.0})
    ConsoleSink(stream).write(1, {"a": 1.0})

    assert not (tmp_path / "metrics.jsonl").exists() and stream.getvalue() == ""


def printed(*points, keys=None):
    """What the console prints of values at iteration 1, 2, ..."""
    stream = io.StringIO()
    sink = ConsoleSink(stream, keys=keys)
    for iteration, values in enumerate(points, 1):
        sink.write(iteration, {"epoch": 1, **values})
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0003, "0.0003"),
        (0.0027238, "0.002724"),
        (-0.0027238, "-0.002724"),
        (1.2345e-5, "1.234e-05"),
        (-1.2345e-5, "-1.23e-05"),
        (0.123456789, "0.1235"),
        (12345.6, "12346"),
        (1234567.0, "1.235e+06"),
        (3, "3"),
        (123456789012, "1.23e+11"),
        (float("nan"), "nan"),
        (torch.tensor(0.5), "0.5"),
    ],
)
def test_console_rounds_to_what_fits_a_column(value, text):
    assert printed({"a": value})[1] == f"      1      1  {text:>9}"


def test_console_shows_what_matters_in_aligned_columns_and_the_rest_not():
    assert printed(
        {
            "memory/peak_mib": 3.0,
            "loss": 0.5,
            "grad_norm": 1.0,
            "lr": 0.00025,
            "lr/head": 0.1,
            "throughput/samples_per_s": 12345.6,
            "throughput/steps_per_s": 1.0,
            "time/step_ms": 2.0,
        },
        {"val/loss": 0.75, "val/accuracy": 0.9},
        {"memory/peak_mib": 3.0},
        {"loss": 0.25, "val/accuracy": 0.95, "throughput/samples_per_s": 999.7},
    ) == [
        "   iter  epoch       loss         lr  samples/s",
        "      1      1        0.5    0.00025      12.3k",
        "   iter  epoch       loss   val/loss  val/accuracy         lr  samples/s",
        "      2      1          -       0.75           0.9          -          -",
        "      4      1       0.25          -          0.95          -      1.00k",
    ]


def test_console_fits_its_columns_into_80_characters_and_keeps_those_that_matter():
    values = {f"val/metric_{number}": 1.0 for number in range(9)} | {"loss": 1.0, "lr": 1.0}
    lines = printed({**values, "throughput/tokens_per_s": 5.0})

    assert lines[0].split() == ["iter", "epoch", "loss", "val/metric_0", "val/metric_1", "lr", "tokens/s"]
    assert {len(line) for line in lines} == {75}  # a further column has 14


def test_console_leaves_out_parts_of_a_total_before_the_total_and_keeps_the_order():
    parts = [f"discriminator/loss/{name}" for name in ("real", "fake", "penalty")]
    lines = printed(dict.fromkeys(["discriminator/loss", *parts, "generator/loss", "lr"], 1.0))

    assert lines[0].split() == ["iter", "epoch", "discriminator/loss", "generator/loss", "lr"]


def test_console_is_as_wide_as_its_terminal():
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(slave, "w") as stream:
        ConsoleSink(stream).write(1, {f"val/metric_{number}": 1.0 for number in range(9)})
        heading = os.read(master, 1000).decode().splitlines()[0]
    os.close(master)

    assert heading.split()[-1] == "val/metric_6" and len(heading) == 14 + 7 * 14


def test_console_prints_the_keys_it_is_given_in_their_order_however_many():
    values = {"loss": 1.0, "val/a": 2.0, "val/b": 3.0, "grad_norm": 4.0, "throughput/steps_per_s": 0.5}
    keys = ["rate", "grad_norm", "val/*", "never", "iter", *(f"key {number}" for number in range(9))]
    heading, line = printed(values, keys=keys)

    assert heading.split()[:7] == ["iter", "epoch", "steps/s", "grad_norm", "val/a", "val/b", "never"]
    assert line.split()[:7] == ["1", "1", "0.500", "4", "2", "3", "-"] and heading.endswith("key 8")


def test_console_repeats_its_heading_in_a_long_run():
    lines = printed(*({"loss": 1.0} for _ in range(90)))

    assert [number for number, line in enumerate(lines) if "iter" in line] == [0, 41, 82]


# -- failing sinks ----------------------------------------------------------------------------------------------------


class Broken:
    """Fails at the given iterations; its state_dict fails too."""

    name = "broken"

    def __init__(self, error, *, at=range(100)):
        self.error, self.at, self.got = error, at, [0]

    def write(self, iteration, values):
        if iteration in self.at:
            raise self.error
        self.got.append(iteration)

    def state_dict(self):
        raise self.error

    def load_state_dict(self, state):
        raise AssertionError("nothing was saved")


def counting():
    return Trainer(lambda engine, batch: float(batch))


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_failing_sink_warns_once_and_stops_neither_the_training_nor_the_others(tmp_path, caplog):
    broken = Broken(RuntimeError("the line is dead."), at=range(2, 5))
    trainer = counting()
    MetricLogger(tmp_path, sinks=[broken], console=False).attach(trainer)
    state = trainer.run(range(6))

    assert (state.status, state.iteration) == ("completed", 6)
    assert [line["iteration"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert broken.got == [0, 1, 5, 6]
    assert warnings_of(caplog) == [
        "The sink broken (Broken) failed: RuntimeError: the line is dead. Training continues and later points are "
        "tried; fix the error, or remove the sink."
    ]


def test_sink_without_a_state_to_tell_is_saved_without(tmp_path, caplog):
    for end in (2, 4):
        trainer = counting()
        broken = Broken(ModuleNotFoundError("No module named 'line'", name="line"), at=range(0))
        MetricLogger(sinks=[broken], console=False).attach(trainer)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
        checkpoint.resume()
        trainer.run([0.0, 1.0, 2.0, 3.0], max_iters=end)

    assert broken.got == [0, 3, 4]
    assert [text for text in warnings_of(caplog) if "install line, or remove the sink" in text] != []


@contextmanager
def files_end_at(size):
    """What a full disk does to a write: a part of it is there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_loses_lines_and_tears_none(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    trainer = counting()
    MetricLogger(tmp_path, console=False).attach(trainer)
    sizes = []

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def fill():
        full = files_end_at(path.stat().st_size + 7)
        full.__enter__()
        trainer.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: full.__exit__(None, None, None))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: sizes.append(path.stat().st_size))

    before = [{"iteration": n, "epoch": 1, "loss": n - 1.0} for n in (1, 2)]
    trainer.run(range(6))

    assert sizes == [len("".join(json.dumps(line) + "\n" for line in before)) + 7]  # the disk was full indeed
    assert [line["iteration"] for line in lines(path)] == [1, 2, 5, 6]
    assert len(warnings_of(caplog)) == 1 and "free some disk space." in warnings_of(caplog)[0]


def test_an_error_of_a_handler_is_raised():
    trainer = counting()
    MetricLogger(console=False).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        trainer.run(range(3))


def test_sink_with_an_attach_of_its_own_is_written_to_once():
    class Own:
        def __init__(self):
            self.got = []

        def attach(self, trainer):
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.write(trainer.state.iteration, {}))

        def write(self, iteration, values):
            self.got.append(iteration)

    own, trainer = Own(), counting()
    MetricLogger(sinks=[own], console=False).attach(trainer)
    trainer.run(range(2))

    assert own.got == [1, 2]


def test_describe_names_the_sinks():
    trainer = counting()
    MetricLogger("unused").attach(trainer)
    said = [line.strip() for line in trainer.describe().splitlines()]

    assert said.index("METRICS_READY") < said.index("JSONLSink.write") < said.index("ConsoleSink.write")


# -- a file that is not ours any more ---------------------------------------------------------------------------------


HOLDER = """
import os, sys, time
from ignite_engine.handlers import JSONLSink
sink = JSONLSink(sys.argv[1])
sink.write(1, {"a": 1.0})
sink.write(2, {"a": 2.0})
print("written", flush=True)
while not os.path.exists(sys.argv[1] + ".ends"):
    time.sleep(0.01)
"""


def holder_of(path):
    """A process that has written two lines, and ends when there is a file ``.ends`` beside them."""
    holder = program(path.parent, HOLDER, str(path))
    deadline = time.monotonic() + 60
    while holder.output.read_text() != "written\n":
        assert holder.poll() is None and time.monotonic() < deadline, holder.errors.read_text()
        time.sleep(0.01)
    return holder


@pytest.mark.parametrize("resumed", [False, True])
def test_file_that_another_process_writes_is_left_alone_with_one_line(resumed, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    holder = holder_of(path)
    content = path.read_bytes()
    trainer = counting()
    logger = MetricLogger(tmp_path, console=False)
    logger.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: Path(f"{path}.ends").touch())
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: holder.communicate(60))
    if resumed:
        trainer.registry.objects["metric_logger/jsonl"].load_state_dict({"start": 0, "line": {"iteration": 1}})
    state = trainer.run(range(4))

    assert state.status == "completed" and path.read_bytes() == content, "not even when the other one has ended"
    assert warnings_of(caplog) == [
        f"The sink metric_logger/jsonl (JSONLSink) failed: FileInUse: {path} is being written by another process. "
        "Training continues and later points are tried; give this run a directory of its own."
    ]


def test_file_that_its_writer_reads_is_left_alone_by_others(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    for iteration in (1, 2):
        sink.write(iteration, {"a": 1.0})
    content = path.read_text()  # as for a plot
    assert in_child(lambda: JSONLSink(path).write(1, {"a": 2.0}))[0] == 1
    assert path.read_text() == content


def test_killed_process_leaves_no_lock(tmp_path):
    path = tmp_path / "metrics.jsonl"
    holder = holder_of(path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate(60)
    JSONLSink(path).write(2, {"a": 3.0})

    assert lines(path) == [{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 3.0}]
