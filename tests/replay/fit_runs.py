"""Runs of ``fit``, each by a function of its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ignite_engine import fit, seed_everything
from ignite_engine.runs.fit import excluding
from ignite_engine.runs.run import Run

torch.set_printoptions(precision=4)
QUIET = {"console": False, "progress": False, "report": False}


def spirals(count: int) -> tuple[Tensor, Tensor]:
    turn, arm = torch.rand(count), torch.randint(3, (count,))
    angle = 9 * turn + 2.094 * arm
    return turn[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1), arm


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3))


def loss_fn(model: torch.nn.Module, batch: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def of_columns(directory: Path) -> Run:
    seed_everything(3)
    return fit(
        make_model(),
        loss_fn,
        train_set=spirals(101),
        val_set=spirals(20),
        directory=directory,
        max_epochs=3,
        batch_size=16,
        lr=0.01,
        schedule="cosine",
        optimizer={"name": "SGD", "momentum": 0.9},
        logging=QUIET,
    )


def excluding_some(directory: Path, samples: Path) -> Run:
    with excluding(samples):
        return of_columns(directory)


def of_a_loader(directory: Path) -> Run:
    torch.manual_seed(4)
    model = make_model()
    return fit(
        model,
        loss_fn,
        DataLoader(TensorDataset(*spirals(70)), batch_size=8, shuffle=True, drop_last=True),
        directory=directory,
        max_epochs=3,
        seed=5,
        accumulation_steps=3,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        logging=QUIET,
    )


def of_a_maker(directory: Path) -> Run:
    torch.manual_seed(3)
    model, data = make_model(), spirals(50)
    run = fit(
        model,
        loss_fn,
        data,
        directory=directory,
        max_iters=11,
        clip_norm=0.2,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        schedule={"name": "cosine", "warmup": 3},
        logging={**QUIET, "every": 4},
    )
    return run


def unseeded(directory: Path) -> Run:
    return fit(make_model(), loss_fn, spirals(20), directory=directory, max_iters=1, logging=QUIET)


if __name__ == "__main__":
    print(of_columns(Path("runs/columns")).summary["weights_sha256"])
