"""One process that trains rank-invariantly: what it computes, what it refuses; the ranks are in tests/ranks."""

import random

import numpy as np
import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpoint_function

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from tests.kit.refusals import refusals
from tests.kit.tiny import Numbers, linear, mse, numbers_loader, one, trainer_of


def invariant(model, micro_batches=4, loss_fn=mse, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = Update(model, optimizer, loss_fn, accumulate="rank_invariant", **options)
    return Trainer(update, global_micro_batches=micro_batches)


@pytest.mark.parametrize("options", [{}, {"weight_fn": lambda batch: len(batch[0])}, {"clip_norm": 0.1}])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8])
def test_weights_and_losses_are_those_of_the_ordinary_update(micro_batches, options):
    """Bit for bit where both add in the same order: up to three micro-batches of equal weight."""
    ends, losses = [], []
    for make in (invariant, lambda model, steps, **given: trainer_of(model, steps, **given)):
        model, found = linear(dtype=torch.float64), list[float]()
        trainer = make(model, micro_batches, **options)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda t=trainer, f=found: f.append(float(t.state.output["loss"]))
        )
        trainer.run(loader(Numbers(29, dtype=torch.float64), 3, shuffle=True), max_epochs=3)
        ends.append(one(model))
        losses.append(found)

    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-14 if micro_batches > 3 or options else 0)
    assert losses[0] == pytest.approx(losses[1], abs=1e-14)


def test_random_numbers_belong_to_the_micro_batch():
    """They do not depend on what was drawn before, and handlers draw the same on every rank."""
    drawn = []
    for noise in (0, 3):
        seen = []

        def loss_fn(model, batch, seen=seen, noise=noise):
            seen.append(torch.rand(()).item())
            torch.rand(noise)
            return mse(model, batch)

        trainer = invariant(linear(), 2, loss_fn)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda _, s=seen: s.append(("handler", torch.rand(1).item()))
        )
        trainer.run(numbers_loader(12, 2), max_epochs=2)
        drawn.append(seen)

    assert drawn[0] == drawn[1] and len(set(drawn[0])) == len(drawn[0])


def test_seed_is_in_the_checkpoint(tmp_path):
    """A process that is seeded otherwise continues with the random numbers of the first."""

    def run(folder, seed, iterations):
        model = linear(dropout=True)
        torch.manual_seed(seed)
        trainer = invariant(model, 2)
        checkpoint = Checkpoint(folder, strict=True)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(numbers_loader(12, 2, shuffle=True), max_iters=iterations)
        return one(trainer.update.model)

    run(tmp_path / "parts", 1, 2)

    assert torch.equal(run(tmp_path / "parts", 2, 5), run(tmp_path / "whole", 1, 5))
    assert not torch.equal(run(tmp_path / "other", 2, 5), run(tmp_path / "whole", 1, 5))


def test_parameter_without_a_gradient_in_all_micro_batches_is_left_alone():
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "rare": nn.Linear(3, 1), "never": nn.Linear(3, 1)})

    def loss_fn(model, batch):
        inputs, targets = batch
        output = model["used"](inputs)
        if inputs[0, 0] > 1.0:
            output = output + model["rare"](inputs)
        return nn.functional.mse_loss(output, targets)

    grads = []
    trainer = invariant(model, 3, loss_fn)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: grads.append([each.weight.grad is None for each in model.values()]),
    )
    trainer.run(numbers_loader(18, 1), max_epochs=1)

    assert {each[0] for each in grads} == {False} and {each[2] for each in grads} == {True}
    assert {each[1] for each in grads} == {False, True}


def test_gradients_that_some_micro_batches_lack_are_summed_before_one_that_is_left_out():
    """Each update has ``rare`` in other ones of its first three micro-batches; the fourth has no weight."""
    batches = [
        ((micro_batch, update >> micro_batch & 1), torch.tensor([[1.0 + update, micro_batch]], dtype=torch.float64))
        for update in (4, 3, 7, 1, 6, 5, 2, 4)
        for micro_batch in range(4)
    ]

    def loss_fn(model, batch):
        (_, is_rare), inputs = batch
        output = model["used"](inputs)
        return (output + model["rare"](inputs) if is_rare else output).sum()

    ends = []
    for rank_invariant in (True, False):
        model = nn.ModuleDict({"used": linear(2, torch.float64), "rare": linear(2, torch.float64)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        update = Update(
            model,
            optimizer,
            loss_fn,
            weight_fn=lambda batch: batch[0][0] < 3,
            accumulate="rank_invariant" if rank_invariant else None,
        )
        trainer = Trainer(update, **{"global_micro_batches" if rank_invariant else "accumulation_steps": 4})
        trainer.run(batches, max_epochs=1)
        assert trainer.state.optimizer_steps == 8
        ends.append(one(model))

    torch.testing.assert_close(*ends, rtol=1e-12, atol=0.0)


def test_update_without_weight_is_skipped_and_one_micro_batch_without_is_left_out():
    weights = iter([0, 0, 0, 2, 0, 0])
    model, before = linear(), one(linear())
    called = []

    def loss_fn(model, batch):
        called.append(trainer.state.iteration)
        return mse(model, batch)

    trainer = invariant(model, 3, loss_fn, weight_fn=lambda batch: next(weights))
    trainer.run(numbers_loader(12, 2), max_epochs=1)

    assert (trainer.state.skipped_steps, trainer.state.optimizer_steps, called) == (1, 1, [2])
    assert not torch.equal(one(model), before)


class Counting(nn.Module):
    def __init__(self, *, in_place):
        super().__init__()
        self.inner, self.in_place = linear(), in_place
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, inputs):
        self.cache = inputs.sum()
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        found = self.inner(inputs)
        return found


def sparse(model, batch):
    return nn.functional.embedding(torch.tensor([1]), model.weight, sparse=True).sum()


def in_several_parts(model, batch):
    """Each reentrant checkpoint is a backward of its own, which adds to the same gradient."""
    inputs = batch[0].requires_grad_()
    twice = (checkpoint_function(model, inputs, use_reentrant=True) for _ in range(2))
    return sum(twice, torch.zeros(())).sum()


class Drawing(nn.Linear):
    """A model that draws from a generator that it made."""

    def __init__(self, source):
        super().__init__(3, 1)
        self.source = source


def test_batch_norm_that_does_not_train_is_accepted():
    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(False)

    for norm in (Frozen(3), nn.BatchNorm1d(3, track_running_stats=False)):
        invariant(nn.Sequential(norm, nn.Linear(3, 1))).run(numbers_loader(12, 2), max_epochs=1)


LAYOUTS = {
    "scalar": torch.tensor(2.0),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "channels last": torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "with a gap": torch.ones(4, 6)[:, :3],
    "bf16": torch.ones(5, dtype=torch.bfloat16),
    "empty": torch.ones(0, 3),
    "large": torch.ones(2**21 + 1),
}


def test_gradients_are_laid_out_as_autograd_does():
    """A norm over other strides could have other bits."""

    def gradients(rank_invariant):
        model = nn.ParameterDict({name: nn.Parameter(values.detach()) for name, values in LAYOUTS.items()})
        update = Update(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, batch: sum((each * batch).sum().float() for each in model.values()),
            accumulate="rank_invariant" if rank_invariant else None,
        )
        Trainer(update, **{"global_micro_batches" if rank_invariant else "accumulation_steps": 2}).run([2.0, 4.0])
        return {name: each.grad for name, each in model.items()}

    found, expected = gradients(True), gradients(False)
    for name, gradient in expected.items():
        assert (found[name].stride(), found[name].dtype) == (gradient.stride(), gradient.dtype), name
        assert torch.equal(found[name], gradient), name


def of(model, *options, **more):
    return lambda: invariant(model, *options, **more).run(numbers_loader(12, 2), max_epochs=1)


def update():
    model = linear()
    return Update(model, torch.optim.SGD(model.parameters()), mse, accumulate="rank_invariant")


SEQUENTIAL = nn.Sequential
test_refusals = pytest.mark.row("D17")(
    refusals(
        [
            ("batch norm", of(SEQUENTIAL(nn.Linear(3, 1), nn.BatchNorm1d(1))), ValueError, "1 BatchNorm1d trains"),
            ("synchronized", of(nn.SyncBatchNorm(3)), ValueError, "rank_invariant SyncBatchNorm"),
            ("data parallel", of(nn.DataParallel(linear())), ValueError, "DataParallel reduces"),
            ("sparse", of(nn.Embedding(3, 1, sparse=True)), ValueError, "Embedding sparse gradients"),
            ("sparse by the loss", of(nn.Embedding(3, 1), loss_fn=sparse), ValueError, "sum sparse gradients"),
            ("several parts", of(linear(), loss_fn=in_several_parts), ValueError, "several parts one backward"),
            ("buffer in place", of(Counting(in_place=True)), ValueError, "rank_invariant changed 'calls'"),
            ("buffer made anew", of(Counting(in_place=False)), ValueError, "rank_invariant changed 'calls'"),
            ("max_norm", of(SEQUENTIAL(nn.Embedding(3, 2, max_norm=1.0))), ValueError, "0 max_norm"),
            ("bags", of(SEQUENTIAL(nn.EmbeddingBag(3, 2, max_norm=1.0))), ValueError, "Bag max_norm"),
            ("a generator", of(Drawing(torch.Generator())), ValueError, "Drawing generator (source)"),
            ("random", of(SEQUENTIAL(Drawing(random.Random(0)))), ValueError, "0 Drawing generator"),
            ("numpy", of(Drawing(np.random.default_rng(0))), ValueError, "torch's global generator"),
            ("steps", lambda: Trainer(update(), 2), ValueError, "all ranks global_micro_batches"),
            ("plain", lambda: Engine(update()).run(numbers_loader(12, 2)), ValueError, "global_micro_batches Engine"),
            ("both", lambda: Trainer(update(), 2, global_micro_batches=4), ValueError, "both 2 4"),
            ("none", lambda: Trainer(update(), global_micro_batches=0), ValueError, "whole number at least 1"),
            ("True", lambda: Trainer(update(), global_micro_batches=True), ValueError, "whole number at least 1"),
        ]
    )
)
