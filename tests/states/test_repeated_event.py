"""What handlers of EPOCH_STARTED do to registered objects is done once for each epoch, resumed within it or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers.param_scheduler import LinearCyclicalScheduler
from ignite.metrics import Average

from ignite_engine import Trainer
from ignite_engine.handlers import Checkpoint, LRSchedule
from tests.builders import numbers_loader, trainer_of, weights


class Kept:
    """What a user registers: a sum that begins anew, a count, a tensor; with a place for what is not comparable."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"sum": 0.0, "epochs": 0, "hidden": torch.zeros(2), "seen": []}
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.state = dict(state)


KINDS = [
    "resets",
    "resets a tensor",
    "counts",
    "appends",
    "torch's schedule",
    "Ignite's schedule",
    "rate by hand",
    "metric",
]


def plant(kind: str, trainer: Trainer) -> None:
    kept, (optimizer,) = Kept(), trainer.update.optimizers.values()  # type: ignore[attr-defined]  # an Update
    trainer.register("kept", kept)

    def begin(engine: Engine) -> None:
        if kind == "resets":
            kept.state = {**kept.state, "sum": 0.0, "hidden": torch.zeros(2)}
        elif kind == "resets a tensor":
            kept.state["hidden"].zero_()
        elif kind == "counts":
            kept.state["epochs"] += 1
        elif kind == "appends":
            kept.state["seen"].append(engine.state.epoch)
        elif kind == "rate by hand":
            optimizer.param_groups[0]["lr"] *= 0.5

    def use(engine: Engine) -> None:
        kept.state["sum"] += float(engine.state.output["loss"])
        kept.state["hidden"] += 1
        seen = sum(kept.state["seen"]) + kept.state["epochs"] + float(kept.state["hidden"].sum())
        with torch.no_grad():  # the weights tell what the states were
            next(iter(trainer.update.model.parameters())).mul_(1 + 1e-3 * (seen + kept.state["sum"]))  # type: ignore[attr-defined]

    trainer.add_event_handler(Events.EPOCH_STARTED, begin)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, use)
    if kind == "torch's schedule":
        LRSchedule(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)).attach(trainer, Events.EPOCH_STARTED)
    elif kind == "Ignite's schedule":
        trainer.add_event_handler(Events.EPOCH_STARTED, LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.01, 6))
    elif kind == "metric":
        Average(output_transform=lambda output: float(output["loss"])).attach(trainer, "mean")


def run(kind: str, folder: Path | None, stop_at: int | None = None, *, twice: bool = False) -> tuple[torch.Tensor, Any]:
    trainer = trainer_of()
    plant(kind, trainer)
    if folder is not None:
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer, Events.COMPLETED)
        checkpoint.resume()
    if stop_at is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: trainer.request_stop("here"))
    trainer.run(numbers_loader(8, 2, shuffle=True), max_epochs=3)
    if twice:
        trainer.run(numbers_loader(8, 2, shuffle=True), max_epochs=3)
    return weights(trainer), trainer.state.metrics.get("mean")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop_at", [3, 4, 6])
def test_resumed_and_continued_runs_have_the_bits_of_the_whole_one(tmp_path: Path, kind: str, stop_at: int) -> None:
    whole, mean = run(kind, None)
    run(kind, tmp_path, stop_at)
    for bits, own_mean in (run(kind, tmp_path), run(kind, None, stop_at, twice=True)):
        assert torch.equal(bits, whole) and own_mean == mean


def test_what_no_handler_has_changed_is_not_loaded_again(tmp_path: Path) -> None:
    loads = []
    for stop_at in (2, None):
        trainer, kept = trainer_of(), Kept()
        trainer.register("kept", kept)
        trainer.add_event_handler(Events.STARTED, lambda _, kept: kept.state.update(sum=5.0), kept)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer, Events.COMPLETED)
        checkpoint.resume()
        if stop_at:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda t=trainer: t.request_stop("here"))
        trainer.run(numbers_loader(8, 2), max_epochs=1)
        loads.append(kept.loads)
    assert loads == [0, 1] and kept.state["sum"] == 5.0, "what STARTED has set stays"
