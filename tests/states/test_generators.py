"""Generators that a model's modules hold are resumed as torch's own are; others are named."""

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import MeanSquaredError
from torch import nn

from ignite_engine import Trainer, Update, Updates, create_evaluator, loader
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.kit.tiny import Numbers, linear, mse, one


class Noise(nn.Module):
    """Adds a number from its own generator."""

    def __init__(self, seed=5):
        super().__init__()
        self.source = torch.Generator().manual_seed(seed)

    def forward(self, hidden):
        return hidden + 0.1 * torch.rand((), generator=self.source)


class NoisyLoss:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self, model, batch):
        return mse(model, batch)


def made(folder, model, loss_fn=mse, **options):
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn))
    checkpoint = Checkpoint(folder, **options)
    checkpoint.attach(trainer)
    return trainer, checkpoint


def weights_after(folder, stops, *, evaluates=False):
    for stop in (*stops, 99):
        model = nn.Sequential(linear(), Noise())
        trainer, checkpoint = made(folder, model, strict=True)
        if evaluates:
            evaluator = create_evaluator(
                model, lambda model, batch: (model(batch[0]), batch[1]), {"mse": MeanSquaredError()}
            )
            Evaluation(evaluator, loader(Numbers(8), 2)).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        checkpoint.resume()
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda: trainer.request_stop("test"))  # noqa: B023  # called in this turn
        trainer.run(loader(Numbers(8), 2), max_epochs=2)
        assert trainer.reproducibility() == []
    return one(model).clone()


def test_a_stopped_run_ends_with_the_bits_of_the_whole_one(tmp_path):
    whole = weights_after(tmp_path / "whole", ())
    assert torch.equal(whole, weights_after(tmp_path / "stopped", (3, 6)))


def test_an_evaluation_draws_nothing_from_them(tmp_path):
    """It may be done again after a stop."""
    whole = weights_after(tmp_path / "whole", ())
    assert torch.equal(whole, weights_after(tmp_path / "evaluated", (), evaluates=True))


def test_updates_in_turn_save_theirs(tmp_path):
    model = nn.Sequential(linear(), Noise())
    turns = {name: Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse) for name in "ab"}
    trainer = Trainer(Updates(turns))
    Checkpoint(tmp_path).attach(trainer)
    assert [name for name in trainer.registry.objects if "generators" in name] == ["generators/a", "generators/b"]


def test_one_generator_that_several_hold_is_saved_once(tmp_path):
    first, second = Noise(), Noise()
    second.source = first.source
    trainer, _ = made(tmp_path, nn.Sequential(linear(), first, second))
    assert list(trainer.registry.objects["generators"].state_dict()) == ["1.source"]


def test_without_any_nothing_is_saved(tmp_path):
    trainer, _ = made(tmp_path, linear())
    assert "generators" not in trainer.registry.objects


def test_other_names_than_saved_are_refused(tmp_path):
    trainer, _ = made(tmp_path, nn.Sequential(linear(), Noise()))
    trainer.run(loader(Numbers(8), 2), max_epochs=1)
    _, checkpoint = made(tmp_path, nn.Sequential(linear(), nn.Identity(), Noise()))
    with pytest.raises(StateMismatch, match=r"has the generators \['2.source'\], and those of \['1.source'\]"):
        checkpoint.resume()


def test_rank_invariant_refuses_one_of_the_loss_function():
    model = linear()
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), NoisyLoss(torch.Generator()), rank_invariant=True
    )
    with pytest.raises(ValueError, match="the loss function has a generator of its own"):
        Trainer(update, global_micro_batches=1).run(loader(Numbers(8), 2), max_epochs=1)
