"""Ignite's loggers on our bus: what they wrote is read back and compared with what the run was."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import FBResearchLogger, ProgressBar, TensorboardLogger, global_step_from_engine
from ignite.handlers.tensorboard_logger import GradsScalarHandler, WeightsScalarHandler
from ignite.metrics import MeanSquaredError, RunningAverage

from ignite_engine import Trainer, create_evaluator
from ignite_engine.handlers import Evaluation
from tests.builders import Passes, numbers_loader, trainer_of
from tests.faults.commands import program
from tests.handlers.test_ignite_handlers import loss_of, predict

ROOT = Path(__file__).resolve().parents[2]


def losses_of(trainer: Trainer) -> list[float]:
    """Gets the loss of each iteration."""
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(loss_of(trainer.state.output)))
    return losses


def test_progress_bar_draws_each_epoch_with_output_and_metrics() -> None:
    screen, trainer = io.StringIO(), trainer_of()
    losses = losses_of(trainer)
    RunningAverage(output_transform=loss_of).attach(trainer, "average")
    bar = ProgressBar(persist=True, file=screen, mininterval=0, ncols=200)
    bar.attach(trainer, ["average"], output_transform=lambda output: {"loss": loss_of(output)})
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: bar.log_message("between"))
    trainer.run(numbers_loader(6, 2), max_epochs=2)
    lines = [line for line in re.split(r"[\r\n]+", screen.getvalue()) if line.strip()]

    for epoch, last in ((1, losses[2]), (2, losses[5])):
        ended = [line for line in lines if line.startswith(f"Epoch [{epoch}/2]") and "3/3" in line]
        assert ended and "100%" in ended[-1] and f"loss={last:.3g}" in ended[-1] and "average=" in ended[-1]
    assert "between" in lines


def test_progress_bar_over_the_whole_run() -> None:
    screen, trainer = io.StringIO(), trainer_of()
    bar = ProgressBar(persist=True, file=screen, mininterval=0, desc="all", ncols=100)
    bar.attach(trainer, event_name=Events.EPOCH_COMPLETED, closing_event_name=Events.COMPLETED)
    trainer.run(numbers_loader(4), max_epochs=3)

    assert re.search(r"all.*100%.*3/3", screen.getvalue())


def test_progress_bar_on_data_of_unknown_length() -> None:
    screen, trainer = io.StringIO(), Trainer(lambda engine, batch: 1.0)
    ProgressBar(persist=True, file=screen, mininterval=0).attach(trainer)
    trainer.run(Passes(3), max_epochs=2)

    # the first pass measures it
    assert "[3/?]" in screen.getvalue() and "[3/3] 100%" in screen.getvalue()


def test_tensorboard_logger_writes_outputs_metrics_rates_weights_and_gradients(tmp_path: Path) -> None:
    trainer = trainer_of()
    update: Any = trainer.update
    losses, optimizer, rates = losses_of(trainer), update.optimizers["optimizer"], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]

    def set_rate() -> None:
        optimizer.param_groups[0]["lr"] = rates[trainer.state.iteration - 1]

    trainer.add_event_handler(Events.ITERATION_STARTED, set_rate)
    evaluator = create_evaluator(update.model, predict, {"mse": MeanSquaredError()})
    found: list[float] = []
    with TensorboardLogger(str(tmp_path)) as logger:
        logger.attach_output_handler(
            trainer,
            Events.ITERATION_COMPLETED(every=2),
            tag="train",
            output_transform=lambda out: {"loss": out["loss"]},
        )
        logger.attach_output_handler(
            evaluator,
            Events.EPOCH_COMPLETED,
            tag="val",
            metric_names="all",
            global_step_transform=global_step_from_engine(trainer),
        )
        logger.attach_opt_params_handler(trainer, Events.ITERATION_STARTED, optimizer=optimizer)
        logger.attach(trainer, WeightsScalarHandler(update.model, reduction=torch.norm), Events.EPOCH_COMPLETED)
        logger.attach(trainer, GradsScalarHandler(update.model, reduction=torch.norm), Events.EPOCH_COMPLETED)
        Evaluation(evaluator, numbers_loader(4)).attach(trainer)
        evaluator.add_event_handler(Events.COMPLETED, lambda: found.append(evaluator.state.metrics["mse"]))
        trainer.run(numbers_loader(6, 2), max_epochs=2)

    scalars = scalars_of(tmp_path)
    assert scalars["train/loss"] == pytest.approx({2: losses[1], 4: losses[3], 6: losses[5]})
    assert scalars["val/mse"] == pytest.approx({1: found[0], 2: found[1]})
    assert scalars["lr/group_0"] == pytest.approx(dict(enumerate(rates, 1)))
    first = dict(update.model.named_parameters())["0.weight"]
    assert scalars["weights_norm/0/weight"][2] == pytest.approx(first.detach().norm().item())
    assert scalars["grads_norm/0/weight"][2] == pytest.approx(first.grad.norm().item())


def scalars_of(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {each.step: each.value for each in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_fbresearch_logger_logs_epochs_iterations_outputs_and_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fb")
    trainer = trainer_of(lr=0.25)
    update: Any = trainer.update
    losses = losses_of(trainer)
    FBResearchLogger(logging.getLogger("fb"), show_output=True).attach(
        trainer, "Train", every=3, optimizer=update.optimizers["optimizer"]
    )
    trainer.run(numbers_loader(6, 2), max_epochs=2)
    lines = [record.getMessage() for record in caplog.records if record.name == "fb"]

    assert [line for line in lines if "start epoch" in line] == [f"Train: start epoch [{epoch}/2]" for epoch in (1, 2)]
    last = [line for line in lines if "[3/3]" in line]
    for epoch, line in enumerate(last, 1):
        assert line.startswith(f"Epoch [{epoch}/2]") and "lr: 0.25000" in line
        assert f"loss: {losses[3 * epoch - 1]:.4f}" in line
    assert len(last) == 2 and any("run completed" in line for line in lines)


# in a process of its own: ClearML takes the signals, patches torch and keeps threads
CLEARML = """
import json, sys
from clearml import Task
from clearml.backend_interface.task.task import Task as BackendTask
BackendTask._report_subprocess_enabled = False  # else close() takes minutes offline
from ignite.engine import Events
from ignite.handlers import ClearMLLogger
from tests.builders import numbers_loader, trainer_of
from tests.handlers.test_ignite_loggers import losses_of

trainer = trainer_of(lr=0.25)
losses = losses_of(trainer)
logger = ClearMLLogger(project_name="p", task_name="t", auto_connect_frameworks=False, auto_resource_monitoring=False)
logger.attach_output_handler(
    trainer, Events.ITERATION_COMPLETED(every=2), tag="train", output_transform=lambda out: {"loss": out["loss"].item()}
)
logger.attach_opt_params_handler(trainer, Events.ITERATION_STARTED, optimizer=trainer.update.optimizers["optimizer"])
trainer.run(numbers_loader(8, 2))
folder = logger.get_task().get_offline_mode_folder()
logger.close()
print("RESULT", json.dumps({"folder": str(folder), "losses": losses}))
"""


@pytest.mark.slow
def test_clearml_logger_reports_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": str(tmp_path)}
    environment |= {"HOME": str(tmp_path), "CLEARML_CONFIG_FILE": str(tmp_path / "none.conf")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    training = program(tmp_path, CLEARML)
    output, errors = training.communicate(180)
    assert training.returncode == 0, errors
    result = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT"))[7:])
    events = [
        event
        for line in (Path(result["folder"]) / "metrics.jsonl").read_text().splitlines()
        for event in json.loads(line)
        if event.get("type") == "training_stats_scalar"
    ]
    values = {(event["metric"], event["variant"], event["iter"]): event["value"] for event in events}

    assert [values["train", "loss", step] for step in (2, 4)] == pytest.approx(result["losses"][1::2])
    assert [value for (metric, _, _), value in values.items() if metric != "train"] == [0.25] * 4
