"""What a run's folder says of its starts and stops."""

import pytest
from ignite.engine import Events

from ignite_engine.ext.report import read_run
from ignite_engine.ext.report.timeline import marks
from ignite_engine.handlers import Checkpoint, MetricLogger
from ignite_engine.run_directory import RunDirectory
from tests.kit.tiny import numbers_loader, trainer_of


def start(folder, stop_at=None, fail_at=None):
    trainer = trainer_of()
    MetricLogger(folder, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    checkpoint = Checkpoint(folder / "checkpoints")
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    checkpoint.resume()

    @trainer.on(Events.ITERATION_COMPLETED)
    def end():
        if trainer.state.iteration == stop_at:
            trainer.request_stop("enough")
        if trainer.state.iteration == fail_at:
            raise ZeroDivisionError("no")

    trainer.run(numbers_loader(), max_epochs=2)


def test_each_start_and_how_it_ended_is_kept(tmp_path):
    start(tmp_path, stop_at=5)
    with pytest.raises(ZeroDivisionError):
        start(tmp_path, fail_at=9)
    start(tmp_path)
    history = [(each["what"], each["iteration"]) for each in RunDirectory(tmp_path).read_history()]

    assert history == [
        ("started", 0),
        ("interrupted", 5),
        ("resumed", 5),
        ("failed", 9),
        ("resumed", 8),
        ("completed", 12),
    ]
    assert (read_run(tmp_path).status, read_run(tmp_path).summary["reason"]) == ("completed", "max_epochs")
    assert [at for at, _ in marks(read_run(tmp_path))] == [5, 8, 9]
    assert marks(read_run(tmp_path))[0] == (5, "enough, resumed")


def test_history_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "history.jsonl").mkdir()
    start(tmp_path)

    assert read_run(tmp_path).series["loss"][-1][0] == 12 and read_run(tmp_path).history == []
