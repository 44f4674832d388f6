"""The task of the runs that use a config: dropout, random augmentation, a metric for the best checkpoint.

Options: ``step_s``: minimum duration of each micro-batch; ``notes``: a folder for each rank's process id and,
while a set is evaluated, a file ``evaluating``; ``phases``: a folder for a file of each process, ``phases_PID``, to
which it appends what it begins to do; ``data_s``: minimum duration of each fetch of a batch; ``ballast``: numbers that
are saved with the model, so that a save takes its time. Nothing is slow once there is a file ``fast`` in ``phases``.
``rows``: of the table of words, which then has sparse gradients.
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

from ignite_engine import Task, Trainer, TrainingEvents
from ignite_engine.events import Phase
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


class Phases:
    """Appends to a file what this process begins to do."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"phases_{os.getpid()}"
        self.says("build")

    def says(self, what: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{what}\n")

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.GET_BATCH_STARTED, lambda: self.says("data wait"))
        trainer.add_event_handler(Events.ITERATION_STARTED, lambda: self.says("step"))
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, lambda: self.says("evaluation"))
        trainer.add_event_handler(TrainingEvents.RESUME_POINT(every=2), self.saves)
        trainer.add_event_handler(Events.COMPLETED, lambda: self.says("after the last update"))

    def saves(self) -> None:
        self.says("save")

    saves.phase = Phase.PREPARE  # type: ignore[attr-defined]


class SlowSamples(Samples):
    """Those whose fetch takes ``sample_s`` each, unless there is a file ``fast``."""

    def __init__(self, count: int, augmentation: str, sample_s: float, fast: Path) -> None:
        super().__init__(count, augmentation)
        self.sample_s, self.fast = sample_s, fast

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.0 if self.fast.exists() else self.sample_s)
        return super().__getitem__(index)


def build(options: Mapping[str, Any]) -> Task:
    folder = Path(options.get("phases", "/nowhere"))
    phases = Phases(folder) if "phases" in options else None
    model = Net(sparse="rows" in options)
    if "rows" in options:
        model.words = nn.Embedding(options["rows"], 8, sparse=True)
    if options.get("layer_norm"):
        model.layers[1] = nn.LayerNorm(16)
    if phases is not None:
        model.ballast = nn.Parameter(torch.zeros(options["ballast"]), requires_grad=False)
        time.sleep(0.0 if (folder / "fast").exists() else 0.3)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.0 if (folder / "fast").exists() else options.get("step_s", 0.0))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def predict(model: nn.Module, batch: Any) -> Any:
        if options.get("notes"):
            (Path(options["notes"]) / "evaluating").touch()
        time.sleep(0.0 if (folder / "fast").exists() else options.get("step_s", 0.0))
        return model(batch[0]).float(), batch[1]

    return Task(
        model=model,
        loss_fn=loss_fn,
        train_set=SlowSamples(46, "drawn", options.get("data_s", 0.0) / 4, folder / "fast"),
        val_sets={"val": Samples(17, "drawn")},
        predict=predict,
        metrics={"accuracy": Accuracy(), "spread": Average(lambda output: output[0].std())},
        handlers=[*([Notes(options["notes"])] if options.get("notes") else []), *([phases] if phases else [])],
    )
