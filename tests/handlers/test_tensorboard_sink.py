"""Scalars as TensorBoard itself reads them, over failures and resumes."""

import logging
import math
import threading

import pytest
from ignite.engine import Events

from ignite_engine import TrainingEvents
from ignite_engine.handlers import Checkpoint, MemoryLogger, MetricLogger, TensorBoardSink
from tests.handlers.test_sinks import files_end_at, lines
from tests.kit.tiny import numbers_loader, trainer_of


def scalars(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def built(run, name="iteration"):
    trainer = trainer_of()
    MetricLogger(run, sinks=[TensorBoardSink(run)], console=False).attach(trainer)
    checkpoint = Checkpoint(run / "checkpoints")
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    checkpoint.resume()
    return trainer


def expected(run):
    """TensorBoard keeps fp32."""
    return [(line["iteration"], pytest.approx(line["loss"], rel=1e-6)) for line in lines(run / "metrics.jsonl")]


def names_of_threads():
    return {thread.name for thread in threading.enumerate()}


def test_tensorboard_reads_what_was_logged(tmp_path):
    trainer = built(tmp_path)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED(every=6))
    threads = set()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: threads.update(names_of_threads()))
    before = names_of_threads()
    trainer.run(numbers_loader())

    assert scalars(tmp_path)["loss"] == expected(tmp_path) and len(expected(tmp_path)) == 6
    assert [step for step, _ in scalars(tmp_path)["memory/host_rss_mib"]] == [6]
    assert threads - {"checkpoint-pruning"} == before


@pytest.mark.parametrize("die_at", [2, 6, 8, 11])
def test_killed_and_resumed_no_point_appears_twice(die_at, tmp_path):
    """At 2 before the first checkpoint, at 8 right after one."""
    trainer = built(tmp_path)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=die_at), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(24))
    assert [step for step, _ in scalars(tmp_path)["loss"]] == list(range(1, die_at + 1))
    built(tmp_path).run(numbers_loader(24))
    once = scalars(tmp_path)
    trainer = built(tmp_path)
    trainer.add_event_handler(Events.STARTED, lambda: trainer.state.metrics.update(loss=9.0))
    goal = expected(tmp_path)
    trainer.run(numbers_loader(24), max_epochs=1)  # at its end already

    assert once["loss"] == goal and [step for step, _ in goal] == list(range(1, 13))
    assert scalars(tmp_path) == once


@pytest.mark.parametrize("die_at", [0, 3])
def test_tensorboard_reads_the_config(die_at, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    def run(die_at=0):
        trainer = trainer_of()
        sink = TensorBoardSink(tmp_path, config={"optimizer": {"lr": 0.5, "betas": [1, 2]}, "name": "a", "no": None})
        MetricLogger(sinks=[sink], console=False).attach(trainer)

        checkpoint = Checkpoint(tmp_path / "checkpoints")
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
        checkpoint.resume()
        if die_at:
            trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=die_at), lambda: 1 / 0)
        trainer.run(numbers_loader(8))

    if die_at:
        with pytest.raises(ZeroDivisionError):
            run(die_at)
    run()
    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()

    assert "optimizer:" in read.Tensors("config")[-1].tensor_proto.string_val[0].decode()
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert {key: getattr(value, value.WhichOneof("kind")) for key, value in hparams.items()} == {
        "optimizer.lr": 0.5,
        "optimizer.betas": "[1, 2]",
        "name": "a",
    }


def test_second_run_of_a_trainer_continues(tmp_path):
    trainer = trainer_of()
    MetricLogger(sinks=[TensorBoardSink(tmp_path)], console=False).attach(trainer)
    trainer.run(numbers_loader(4), max_epochs=1)
    trainer.run(numbers_loader(4), max_epochs=2)

    assert [step for step, _ in scalars(tmp_path)["loss"]] == [1, 2, 3, 4]


def test_nan_is_written_and_what_is_not_a_number_is_left_out(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write(1, {"loss": math.nan, "word": "good", "flag": True, "epoch": 1})

    assert scalars(tmp_path).keys() == {"loss", "epoch"} and math.isnan(scalars(tmp_path)["loss"][0][1])


def test_disk_that_was_full_costs_the_points_of_that_time_only(tmp_path):
    trainer = trainer_of()
    MetricLogger(sinks=[TensorBoardSink(tmp_path)], console=False).attach(trainer)
    full = files_end_at(230)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=1), lambda: full.__enter__())
    trainer.add_event_handler(Events.ITERATION_STARTED(once=9), lambda: full.__exit__(None, None, None))
    trainer.run(numbers_loader(24))

    steps = [step for step, _ in scalars(tmp_path)["loss"]]
    assert steps[-4:] == [9, 10, 11, 12] and 4 < len(steps) < 12
    assert all(path.stat().st_size for path in (tmp_path / "tensorboard").iterdir())


def test_full_disk_is_one_warning(tmp_path, caplog):
    trainer = trainer_of()
    MetricLogger(sinks=[TensorBoardSink(tmp_path)], console=False).attach(trainer)
    with files_end_at(60):
        state = trainer.run(numbers_loader(24))

    assert state.status == "completed" and list((tmp_path / "tensorboard").iterdir()) == []
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1 and "free some disk space." in warned[0]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("ignite.distributed.get_rank", lambda: 1)
    TensorBoardSink(tmp_path).write(1, {"loss": 1.0})

    assert list(tmp_path.iterdir()) == []
