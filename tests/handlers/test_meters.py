"""Meters and metrics of several numbers: exact over intervals and ranks, and one collective with the means."""

import math

import pandas
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, ClassificationReport, ConfusionMatrix, Precision, PrecisionRecallCurve, RocCurve

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.handlers import MetricLogger
from ignite_engine.handlers.meters import Meter, Stopwatch
from tests.handlers.test_metric_logger import EVERY_2, lines, reads_counted
from tests.kit.collectives import Collectives
from tests.kit.fitting import fitted
from tests.kit.processes import ranks


def of_outputs(trainer):
    for how in ("sum", "mean", "max", "min"):
        trainer.state.meters[f"{how} of a"] = Meter(how, of="a")


def test_meters_of_a_value_that_the_update_returns(tmp_path):
    trainer = Trainer(lambda engine, batch: {"a": torch.tensor(float(batch)), "loss": 0.0})
    of_outputs(trainer)
    MetricLogger(tmp_path, console=False).attach(trainer, EVERY_2)
    trainer.run([3, 1, 5])

    head = {"epoch": 1, "loss": 0.0}
    assert lines(tmp_path) == [
        {"iteration": 2, **head, "a": 2.0, "sum of a": 4.0, "mean of a": 2.0, "max of a": 3.0, "min of a": 1.0},
        {"iteration": 3, **head, "a": 5.0, "sum of a": 5.0, "mean of a": 5.0, "max of a": 5.0, "min of a": 5.0},
    ]


def test_meter_of_what_it_is_given_is_read_at_the_log_point_only():
    trainer, seen = Trainer(lambda engine, batch: None), []
    meter = trainer.state.meters["steps"] = Meter("sum")
    trainer.state.meters["never"] = Meter("max")

    @trainer.on(Events.ITERATION_STARTED)
    def count():
        value = torch.full((1,), float(trainer.state.iteration), requires_grad=True)
        with reads_counted() as reads:
            meter.update(value)
            meter.update(0.5)
        value.data.zero_()
        assert reads.total() == 0

    MetricLogger(console=False).attach(trainer, EVERY_2)
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: seen.append(dict(trainer.state.metrics.fresh)))
    trainer.run(range(4))

    assert seen == [{"steps": 1 + 2 + 1}, {"steps": 3 + 4 + 1}] and meter.count == 0


def test_stopwatch_is_the_mean_time_of_a_use(clock):
    trainer, times = Trainer(lambda engine, batch: None), iter([0.25, 0.75])
    watch = trainer.state.meters["time/augment_ms"] = Stopwatch()

    @trainer.on(Events.ITERATION_STARTED)
    def work():
        clock.move(5.0)
        with watch:
            clock.move(next(times))

    MetricLogger(console=False).attach(trainer, Events.EPOCH_COMPLETED)
    assert trainer.run(range(2)).metrics["time/augment_ms"] == pytest.approx(500.0)


def test_on_two_ranks_all_meters_and_means_are_one_exchange():
    def work(rank):
        """Rank 1 gives its own meter nothing, and larger values."""
        trainer = Trainer(lambda engine, batch: {"loss": 0.0, "a": float(batch) + 10 * rank})
        of_outputs(trainer)
        given = trainer.state.meters["given"] = Meter("mean")
        trainer.state.meters["nothing"] = Meter("min")
        MetricLogger(console=False).attach(trainer, Events.EPOCH_COMPLETED)
        if rank == 0:
            trainer.add_event_handler(Events.ITERATION_STARTED, lambda: given.update(float(trainer.state.iteration)))
        counts = []
        with Collectives() as collectives:
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: counts.append(collectives.exchanges))
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: counts.append(collectives.exchanges))
            state = trainer.run([1, 2, 3], max_epochs=1)
        return counts[1] - counts[0], dict(state.metrics)

    expected = {"loss": 0.0, "a": 7.0, "sum of a": 42.0, "mean of a": 7.0, "max of a": 13.0, "min of a": 1.0}
    assert ranks(2, work) == [(1, {**expected, "given": 2.0})] * 2


# -- metrics of several numbers, and the log of a run as a table -------------------------------------------------------


def first_class(output):
    return torch.softmax(output[0], 1)[:, 0], (output[1] == 0).long()


def test_run_logs_lists_and_evaluate_returns_the_values(tmp_path):
    pytest.importorskip("sklearn")
    metrics = {
        "accuracy": Accuracy(),
        "precision": Precision(average=False),
        "confusion": ConfusionMatrix(3),
        "details": ClassificationReport(output_dict=True),
        "curve": PrecisionRecallCurve(output_transform=first_class),
        "roc": RocCurve(output_transform=first_class),
    }
    run = fitted(tmp_path, metrics=metrics, best="val/accuracy", max_epochs=1)
    line, values = lines(tmp_path)[-1], run.evaluate()

    assert len(line["val/precision"]) == 3 and all(isinstance(value, float) for value in line["val/precision"])
    assert torch.tensor(line["val/confusion"]).sum() == 12 and isinstance(line["val/roc"][0][0], float)
    assert line["val/details"]["macro avg"].keys() >= {"precision", "recall"}
    assert {f"val/{name}" for name in metrics} <= line.keys() & values.keys()
    assert line["val/confusion"] == values["val/confusion"] and line["val/accuracy"] == run.metrics["val/accuracy"]


def test_metric_of_very_many_numbers_is_not_logged(tmp_path, caplog):
    class Large(Accuracy):
        def compute(self):
            return torch.zeros(1001)

    fitted(tmp_path, metrics={"large": Large(), "confusion": ConfusionMatrix(3)}, max_epochs=1)

    assert "'val/large' is 1001 numbers" in caplog.text
    assert {key for line in lines(tmp_path) for key in line if key.startswith("val")} == {"val/confusion"}


def test_history_is_a_list_of_what_was_logged_and_a_table_with_pandas(tmp_path):
    run = fitted(tmp_path, max_epochs=2, MetricLogger={"every": 4, "console": False})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 13, "loss": "nan"}\n')
    history = run.history
    frame = pandas.DataFrame(history)

    assert [point["iteration"] for point in history] == [4, 6, 8, 12, 13] == frame["iteration"].tolist()
    assert history[3]["val/loss"] == run.metrics["val/loss"] == frame["val/loss"].tolist()[3]
    assert math.isnan(history[4]["loss"]) and frame["loss"].isna().tolist()[3:] == [False, True]
    assert frame["val/loss"].isna()[0]
