"""Histograms of the gradients, as they are before clipping."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.handlers import GradientHistograms, MetricLogger
from tests.builders import linear, mse, numbers_loader, trainer_of, weights


def counted(folder: Path, name: str, iteration: int) -> dict[str, list[float]]:
    values: dict[str, list[float]] = json.loads((folder / "media" / name / f"{iteration:08d}.json").read_text())
    return values


def test_each_parameter_has_one_of_its_whole_gradient_at_the_event(tmp_path: Path) -> None:
    trainer, data = trainer_of(clip_norm=1e-4), numbers_loader()
    gradients: list[torch.Tensor] = []

    def note(trainer: Trainer) -> None:
        gradients.append(trainer.update.model[0].weight.grad.clone())  # type: ignore[attr-defined]

    event = TrainingEvents.OPTIMIZER_STEP_STARTED(every=4)
    trainer.add_event_handler(event, note)
    GradientHistograms().attach(trainer, event)
    MetricLogger(tmp_path).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    trainer.run(data, max_epochs=2)

    assert len(gradients) == 3
    for iteration, gradient in zip((4, 8, 12), gradients, strict=True):
        found = counted(tmp_path, "gradients/0.weight", iteration)
        assert sum(found["counts"]) == gradient.numel()
        assert found["edges"][0] == pytest.approx(gradient.min().item())
        assert found["edges"][-1] == pytest.approx(gradient.max().item())
    assert {path.name for path in (tmp_path / "media" / "gradients").iterdir()} == {
        name for name, _ in linear().named_parameters()
    }


def test_patterns_choose_and_no_bit_changes(tmp_path: Path) -> None:
    plain, watched = trainer_of(), trainer_of()
    GradientHistograms(["2.*"]).attach(watched, TrainingEvents.OPTIMIZER_STEP_STARTED)
    MetricLogger(tmp_path).attach(watched)
    for trainer in (plain, watched):
        trainer.run(numbers_loader(), max_epochs=1)
    assert torch.equal(weights(plain), weights(watched))
    assert {path.name for path in (tmp_path / "media" / "gradients").iterdir()} == {"2.weight", "2.bias"}


def test_wrong_use_is_one_sentence() -> None:
    with pytest.raises(TypeError, match=r"include must be a list of patterns of names, or None, got 'head'"):
        GradientHistograms("head")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(TypeError, match=r"the update's model must be a module, got None"):
        GradientHistograms().attach(Trainer(lambda engine, batch: mse(linear(), batch)))
