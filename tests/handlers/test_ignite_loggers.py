"""Ignite's loggers on our bus: what they wrote is read back and compared with what the run was."""

import io
import logging
import re
from pathlib import Path

from ignite.engine import Events
from ignite.handlers import FBResearchLogger, ProgressBar
from ignite.metrics import RunningAverage

from tests.handlers.test_ignite_handlers import loss_of
from tests.kit.tiny import numbers_loader, trainer_of

ROOT = Path(__file__).resolve().parents[2]


def losses_of(trainer):
    """Gets the loss of each iteration."""
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(loss_of(trainer.state.output)))
    return losses


def test_progress_bar_draws_each_epoch_with_output_and_metrics():
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


def test_fbresearch_logger_logs_epochs_iterations_outputs_and_rate(caplog):
    caplog.set_level(logging.INFO, "fb")
    trainer = trainer_of(lr=0.25)
    update = trainer.update
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
from tests.kit.tiny import numbers_loader, trainer_of
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
