"""Generators that a model's modules hold are resumed as torch's own are; others are named."""

import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch import nn

from ignite_engine import Trainer, Update, Updates, create_evaluator, loader
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.kit.floors import of
from tests.kit.refusals import refusals
from tests.kit.resume import assert_resumes, program
from tests.kit.tiny import Numbers, linear, mse, one


class Noise(nn.Module):
    """Adds a number from its own generator."""

    def __init__(self, seed=5):
        super().__init__()
        self.source = torch.Generator().manual_seed(seed)

    def forward(self, hidden):
        return hidden + 0.1 * torch.rand((), generator=self.source)


def made(folder, model, loss_fn=mse, **options):
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn))
    checkpoint = Checkpoint(folder, **options)
    checkpoint.attach(trainer)
    return trainer, checkpoint


def noisy():
    return nn.Sequential(linear(), Noise())


def test_a_run_goes_on_with_the_numbers_that_come_next(tmp_path):
    assert_resumes(program(model=noisy, checkpoint={"strict": True}, parts=("generators",)), tmp_path, how=("stop",))


def test_an_evaluation_draws_nothing_from_them(tmp_path):
    """It may be done again after a stop."""
    ends = []
    for evaluates in (False, True):
        trainer, _ = made(tmp_path / str(evaluates), model := noisy())
        if evaluates:
            evaluator = create_evaluator(model, lambda model, batch: model(batch[0]), {"mean": Average()})
            Evaluation(evaluator, loader(Numbers(8), 2)).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        trainer.run(loader(Numbers(8), 2), max_epochs=2)
        ends.append(one(model))
    assert torch.equal(*ends) and trainer.reproducibility() == []


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
    assert "generators" not in made(tmp_path, linear())[0].registry.objects


def other_names(folder):
    trainer, _ = made(folder, noisy())
    trainer.run(loader(Numbers(8), 2), max_epochs=1)
    made(folder, nn.Sequential(linear(), nn.Identity(), Noise()))[1].resume()


def loss_that_draws():
    def loss_fn(model, batch):
        return mse(model, batch)

    loss_fn.generator = torch.Generator()
    update = Update(
        model := linear(), torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, accumulate="rank_invariant"
    )
    Trainer(update, global_micro_batches=1).run(loader(Numbers(8), 2), max_epochs=1)


test_refusals = refusals(
    [
        ("other names than saved", other_names, StateMismatch, "generators 2.source 1.source"),
        *of(
            "rank_invariant",
            [("a loss that draws, rank-invariant", loss_that_draws, ValueError, "loss function generator of its own")],
        ),
    ]
)
