"""What the user's objects change and no checkpoint holds is found by its name."""

from __future__ import annotations

from typing import Any

import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update
from ignite_engine.checkpointing.digests import digests
from ignite_engine.ext.replay.unsaved_state import unsaved_state
from tests.builders import linear, numbers_loader
from tests.ext.replay.objects import Counting, NoisyLoss, Saved


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.seen += 1
        return self.inner(x)


def test_what_the_users_code_changes_and_nobody_saves_is_found() -> None:
    model = Noisy()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), NoisyLoss()))
    Counting().attach(trainer)
    trainer.register("saved", saved := Saved())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, saved.count)
    before = digests(unsaved_state(trainer))
    trainer.run(numbers_loader(), max_iters=3)
    after = digests(unsaved_state(trainer))

    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        "loss_fn.generators.0",
        "model.calls",
        "model.seen",
        "Counting.random",
        "Counting.table.numpy",
    }
    assert "Numbers.inputs" in after and not any("many" in name for name in after)
