"""One JSON object per iteration, whatever happened before; and a log that cannot be written stops no training."""

import json
import logging
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from ignite.engine import Events

from ignite_engine import Trainer
from ignite_engine.handlers import Checkpoint, MetricLogger
from ignite_engine.handlers.log import Log
from tests.kit.processes import ranks, start, wait_until
from tests.kit.tiny import numbers_loader, trainer_of

NAN, INF = float("nan"), float("inf")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path, *iterations, **values):
    """A log that has ``a`` at these iterations, ten times as much each."""
    log = Log(path)
    for iteration in iterations:
        log.write({"iteration": iteration, "a": 10.0 * iteration, **values})
    return log


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.row("F1")
def test_values_of_one_iteration_share_a_line(tmp_path):
    log = written(tmp_path / "metrics.jsonl", 1, 2)
    log.write({"iteration": 2, "a": 3.0, "long name": 5.0})
    log.write({"iteration": 3, "a": 4.0})

    assert lines(tmp_path / "metrics.jsonl") == [
        {"iteration": 1, "a": 10.0},
        {"iteration": 2, "a": 3.0, "long name": 5.0},
        {"iteration": 3, "a": 4.0},
    ]


def test_a_line_is_strict_json_and_on_disk_when_it_is_written(tmp_path):
    values = {"epoch": 1, "b": 0.1 + 0.2, "a": NAN, "c": -INF, "d": 1.5, "e": True, "f": "word"}
    Log(path := tmp_path / "new" / "metrics.jsonl").write({"iteration": 1, **values})

    assert path.read_text() == (
        '{"iteration": 1, "epoch": 1, "a": "nan", "b": 0.30000000000000004, '
        '"c": "-inf", "d": 1.5, "e": true, "f": "word"}\n'
    )


def cut_back(path):
    """Killed while it wrote the fourth line, resumed from the second."""
    log = written(path, 1, 2)
    saved = log.state_dict()
    log.write({"iteration": 2, "joined": 9.0})
    log.write({"iteration": 3, "a": 3.0})
    tear(path)
    resumed = Log(path)
    resumed.load_state_dict(saved)
    resumed.write({"iteration": 3, "a": 30.0})


def without_the_file(path):
    """Resumed in another folder: there is no hole for the lines that are not there."""
    resumed = Log(path)
    resumed.load_state_dict(written(path.with_name("old.jsonl"), 1, 2).state_dict())
    resumed.write({"iteration": 3, "a": 30.0})


def started_over(path):
    """Killed before its first checkpoint, the same command starts at iteration 1 again."""
    written(path, 1, 2, 3)
    tear(path)
    written(path, 1, 2)


def tear(path):
    with path.open("a") as file:
        file.write('{"iteration": 4, "a"')


@pytest.mark.parametrize(
    ("write", "expected"), [(cut_back, [1, 2, 3]), (without_the_file, [2, 3]), (started_over, [1, 2])]
)
def test_no_line_is_missing_torn_or_there_twice(write, expected, tmp_path):
    write(tmp_path / "metrics.jsonl")
    found = lines(tmp_path / "metrics.jsonl")

    assert [(line["iteration"], line["a"]) for line in found] == [(number, 10.0 * number) for number in expected]
    assert not any("joined" in line for line in found)


def test_second_run_of_one_process_doubles_no_line(tmp_path):
    trainer, found = trainer_of(), []
    MetricLogger(tmp_path, console=False).attach(trainer)
    for _ in range(2):
        trainer.run(numbers_loader(6), max_epochs=1)
        found.append(lines(tmp_path / "metrics.jsonl"))
    first, second = found

    assert [line["iteration"] for line in first] == [line["iteration"] for line in second] == [1, 2, 3]
    assert all(before["loss"] != after["loss"] for before, after in zip(first, second, strict=True))


def test_other_ranks_write_nothing(tmp_path):
    ranks(2, lambda rank: Log(tmp_path / f"{rank}.jsonl").write({"iteration": 1, "a": 1.0}))

    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl"]


# -- a file that cannot be written ------------------------------------------------------------------------------------


def counting():
    return Trainer(lambda engine, batch: float(batch))


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


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
    path, trainer, sizes = tmp_path / "metrics.jsonl", counting(), []
    MetricLogger(tmp_path, console=False).attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def fill():
        sizes.append(path.stat().st_size)
        full = files_end_at(sizes[0] + 7)
        full.__enter__()
        trainer.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: full.__exit__(None, None, None))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: sizes.append(path.stat().st_size))

    trainer.run(range(6))

    assert sizes[1] == sizes[0] + 7  # the disk was full indeed
    assert [line["iteration"] for line in lines(path)] == [1, 2, 5, 6]
    (line,) = warnings_of(caplog)
    assert "too large" in line


# -- a file that is not ours any more ---------------------------------------------------------------------------------


def hold(path):
    """Writes two lines, and holds the file until there is one ``.ends`` beside it."""
    log = written(path, 1, 2)
    print("written", flush=True)
    wait_until(lambda: Path(f"{path}.ends").exists())
    log.close()


def holder_of(path):
    holder = start(hold, path)
    wait_until(lambda: "written" in holder.said(), holder)
    return holder


@pytest.mark.parametrize("resumed", [False, True])
def test_file_that_another_process_writes_is_left_alone_with_one_line(resumed, tmp_path, caplog):
    def run(path, iterations, at_the_third=lambda: None):
        trainer, checkpoint = counting(), Checkpoint(tmp_path / "checkpoints")
        MetricLogger(path.parent, console=False).attach(trainer)
        checkpoint.attach(trainer)
        trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: at_the_third())
        checkpoint.resume()
        return trainer.run(range(4), max_iters=iterations)

    path = tmp_path / "metrics.jsonl"
    if resumed:
        run(tmp_path / "before" / "metrics.jsonl", 1)
    holder, logged = holder_of(path), len(warnings_of(caplog))
    content = path.read_bytes()

    def end():
        Path(f"{path}.ends").touch()
        assert holder.wait() == 0

    state = run(path, 4, end)
    said = [line for line in warnings_of(caplog)[logged:] if "is not written" in line]

    assert state.status == "completed" and path.read_bytes() == content, "not even when the other one has ended"
    assert len(said) == 1 and "another process" in said[0]


def test_file_that_its_writer_reads_is_left_alone_by_others(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = written(path, 1, 2)
    content = path.read_text()  # as for a plot
    other = start(lambda: Log(path).write({"iteration": 1, "a": 2.0}))

    assert other.wait() == 0 and "another process" in other.said() and path.read_text() == content
    log.close()


def test_killed_process_leaves_no_lock(tmp_path):
    path = tmp_path / "metrics.jsonl"
    holder = holder_of(path)
    holder.signal(signal.SIGKILL)
    holder.wait()
    written(path, 2)

    assert [line["iteration"] for line in lines(path)] == [1, 2]
