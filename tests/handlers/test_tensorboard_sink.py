"""Scalars as TensorBoard itself reads them, over failures and resumes."""

import json
import math
import resource
import signal
import threading

import pytest
from ignite.engine import Events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ignite_engine import TrainingEvents
from ignite_engine.handlers import Checkpoint, MemoryLogger, MetricLogger, TensorBoardSink
from tests.kit.processes import ranks
from tests.kit.tiny import numbers_loader, trainer_of

CONFIG = {"optimizer": {"lr": 0.5, "betas": [1, 2]}, "name": "a", "no": None}


def read(run):
    return EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars(run):
    found = read(run)
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def steps(run):
    return [step for step, _ in scalars(run)["loss"]]


def built(run, **options):
    trainer = trainer_of()
    MetricLogger(run, sinks=[TensorBoardSink(run, **options)], console=False).attach(trainer)
    checkpoint = Checkpoint(run / "checkpoints")
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    checkpoint.resume()
    return trainer


def logged(run):
    """The losses in the log; TensorBoard keeps fp32."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["iteration"], pytest.approx(line["loss"], rel=1e-6)) for line in lines]


def names_of_threads():
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.row("F1")
def test_tensorboard_reads_what_was_logged(tmp_path):
    trainer, before, threads = built(tmp_path), names_of_threads(), set()
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED(every=6))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: threads.update(names_of_threads()))
    trainer.run(numbers_loader())
    trainer.run(numbers_loader(), max_epochs=2)  # continues

    found = scalars(tmp_path)
    assert found["loss"] == logged(tmp_path) and len(found["loss"]) == 12
    assert [step for step, _ in found["memory/host_rss_mib"]] == [6, 12]
    assert threads - {"checkpoint-pruning"} == before


@pytest.mark.parametrize("die_at", [2, 6, 8])
def test_killed_and_resumed_no_point_and_no_config_is_lost_or_appears_twice(die_at, tmp_path):
    """At 2 before the first checkpoint, at 8 right after one."""
    trainer = built(tmp_path, config=CONFIG)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=die_at), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(24))
    assert steps(tmp_path) == list(range(1, die_at + 1))
    built(tmp_path, config=CONFIG).run(numbers_loader(24))
    once, goal = scalars(tmp_path), logged(tmp_path)
    assert once["loss"] == goal and [step for step, _ in goal] == list(range(1, 13))

    trainer = built(tmp_path, config=CONFIG)
    trainer.add_event_handler(Events.STARTED, lambda: trainer.state.metrics.update(loss=9.0))
    trainer.run(numbers_loader(24), max_epochs=1)  # at its end already
    assert scalars(tmp_path) == once

    found = read(tmp_path)
    assert "optimizer:" in found.Tensors("config")[-1].tensor_proto.string_val[0].decode()
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in hparams.items()}
    assert values == {"optimizer.lr": 0.5, "optimizer.betas": "[1, 2]", "name": "a"}


def test_nan_is_written_and_what_is_not_a_number_is_left_out(tmp_path):
    TensorBoardSink(tmp_path).write(1, {"loss": math.nan, "word": "good", "flag": True, "epoch": 1})
    assert scalars(tmp_path).keys() == {"loss", "epoch"} and math.isnan(scalars(tmp_path)["loss"][0][1])


def test_a_full_disk_is_a_warning_and_costs_the_points_of_that_time_only(tmp_path, caplog):
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size, limits = 230, resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = trainer_of()
    MetricLogger(sinks=[TensorBoardSink(tmp_path)], console=False).attach(trainer)
    for iteration, most in ((1, size), (9, limits[0])):
        trainer.add_event_handler(
            Events.ITERATION_STARTED(once=iteration),
            lambda *, most=most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1])),
        )
    try:
        assert trainer.run(numbers_loader(24)).status == "completed"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)

    found = steps(tmp_path)
    assert found[-4:] == [9, 10, 11, 12] and 4 < len(found) < 12
    assert any("disk space" in line for line in caplog.messages)


def test_other_ranks_write_nothing(tmp_path):
    ranks(2, lambda rank: TensorBoardSink(tmp_path / str(rank)).write(1, {"loss": 1.0}))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
