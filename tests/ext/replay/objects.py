"""Objects of a user whose state a checkpoint does not hold, and one whose state it does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer
from tests.builders import mse


class NoisyLoss:
    def __init__(self) -> None:
        self.generators = {torch.Generator().manual_seed(1)}  # in anything but a set it would be saved

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return mse(model, batch) * torch.rand(1, generator=next(iter(self.generators))).item()


class Counting:
    """A handler with a state of its own and no state_dict."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.table = {"numpy": np.random.default_rng(4), "many": list(range(5000))}

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self)

    def __call__(self) -> None:
        self.random.random()
        self.table["numpy"].random()  # type: ignore[union-attr]  # a Generator


class Saved:
    name = "saved"

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> None:
        self.number += 1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]
