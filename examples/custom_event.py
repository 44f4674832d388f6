"""An event of one's own: fired when the loss has halved again; checkpoints and a message come at it.

    python examples/custom_event.py [runs/custom_event]

The handler that fires it does not know who listens, and those who listen do not know who fires it.
"""

from __future__ import annotations

import sys
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import EventEnum, Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint


class LossEvents(EventEnum):
    """``HALVED``: the loss of an epoch is at most half of what it was when this was fired last."""

    HALVED = "halved"


class LossWatch:
    """Fires ``LossEvents.HALVED`` and counts it in ``state.halvings``, by which ``HALVED(every=2)`` goes."""

    def __init__(self) -> None:
        self.limit = torch.inf
        self.halvings = 0

    def attach(self, trainer: Trainer, event: Any = Events.EPOCH_COMPLETED) -> None:
        trainer.register_events(*LossEvents, event_to_attr={LossEvents.HALVED: "halvings"})
        trainer.register("loss_watch", self)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        loss = trainer.state.output["loss"].item()
        if loss > self.limit:
            return
        is_first, self.limit = self.limit == torch.inf, loss / 2
        if not is_first:
            self.halvings += 1
            trainer.state.halvings = self.halvings  # type: ignore[attr-defined]  # a counter of our own
            trainer.fire_event(LossEvents.HALVED)

    def state_dict(self) -> dict[str, float]:
        return {"limit": self.limit, "halvings": self.halvings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.limit, self.halvings = state["limit"], state["halvings"]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def main(directory: str = "runs/custom_event", *, epochs: int = 12) -> Trainer:
    """Train, or resume."""
    seed_everything(0)
    inputs = torch.randn(256, 4)
    samples = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = nn.Linear(4, 1).to(idist.device())
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.02), loss_fn))
    LossWatch().attach(trainer)  # before what listens: it registers the event
    checkpoint = Checkpoint(f"{directory}/checkpoints", keep_last=100)
    checkpoint.attach(trainer, LossEvents.HALVED(every=2))  # each time that the loss is a quarter

    @trainer.on(LossEvents.HALVED)
    def tell(trainer: Trainer) -> None:
        print(f"epoch {trainer.state.epoch}: the loss has halved, {trainer.state.output['loss'].item():.6f}")

    checkpoint.resume()
    trainer.run(loader(samples, batch_size=32, shuffle=True), max_epochs=epochs)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
