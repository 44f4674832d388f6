"""The task of the runs that use a config: dropout, random augmentation, a metric for the best checkpoint.

Options: ``step_s``: minimum duration of each micro-batch; ``notes``: a folder for each rank's process id and,
while a set is evaluated, a file ``evaluating``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Average
from torch import nn

from ignite_engine import Task, Trainer
from tests.campaign.data import Samples
from tests.campaign.training import Net


class Notes:
    """Writes the process id of each rank to a file."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.STARTED, self)

    def __call__(self) -> None:
        (self.folder / f"pid_{idist.get_rank()}").write_text(str(os.getpid()))


def build(options: Mapping[str, Any]) -> Task:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(options.get("step_s", 0.0))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def predict(model: nn.Module, batch: Any) -> Any:
        if options.get("notes"):
            (Path(options["notes"]) / "evaluating").touch()
        time.sleep(options.get("step_s", 0.0))
        return model(batch[0]).float(), batch[1]

    return Task(
        model=Net(sparse=False),
        loss_fn=loss_fn,
        train_set=Samples(46, "drawn"),
        val_sets={"val": Samples(17, "drawn")},
        predict=predict,
        metrics={"accuracy": Accuracy(), "spread": Average(lambda output: output[0].std())},
        handlers=[Notes(options["notes"])] if options.get("notes") else [],
    )
