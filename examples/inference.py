"""A model from the folder of a run, without a trainer: the best weights, as they were evaluated, in evaluation mode.

    python examples/inference.py [runs/inference]

The config of the run is in each checkpoint, and names the function below, which builds the model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.metrics import Accuracy
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Task, load_model
from ignite_engine.cli import main as ignite_engine

CONFIG = """
task: {here}:build
task_options: {{width: 32}}
run: {{directory: {directory}, max_epochs: 11}}
optimizer: {{lr: 0.01}}
checkpoint: {{best: val/accuracy, mode: max}}
ema: {{decay: 0.9}}
logging: {{clearml: false}}
"""


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return model(inputs), targets


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(*predict(model, batch))


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :3].argmax(dim=1)


def build(options: Mapping[str, Any]) -> Task:
    """What ``python -m ignite_engine train`` trains."""
    inputs, targets = data()
    return Task(
        model=nn.Sequential(nn.Linear(8, options["width"]), nn.ReLU(), nn.Dropout(0.1), nn.Linear(options["width"], 3)),
        loss_fn=loss_fn,
        train_set=TensorDataset(inputs[:500], targets[:500]),
        val_sets={"val": TensorDataset(inputs[500:], targets[500:])},
        predict=predict,
        metrics={"accuracy": Accuracy()},
    )


def main(directory: str = "runs/inference") -> tuple[nn.Module, Tensor]:
    """The model and the classes of the validation inputs."""
    if not Path(directory).exists():
        config = Path(f"{directory}.yaml")
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(CONFIG.format(here=Path(__file__).resolve(), directory=directory))
        ignite_engine(["train", str(config)])

    # import_task: the file that the config names is executed, so do it for runs that you trust
    model = load_model(f"{directory}/best", import_task=True, device=idist.device())
    inputs, targets = data()
    with torch.inference_mode():
        classes = model(inputs[500:].to(idist.device())).argmax(dim=1).cpu()
    print(f"accuracy {(classes == targets[500:]).float().mean().item():.4f}")
    return model, classes


if __name__ == "__main__":
    main(*sys.argv[1:])
