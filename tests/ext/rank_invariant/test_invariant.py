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
from tests.kit.tiny import Numbers, linear, mse, numbers_loader, one, trainer_of


def invariant(model, micro_batches=4, loss_fn=mse, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = Update(model, optimizer, loss_fn, rank_invariant=True, **options)
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


def test_order_of_addition_is_the_tree():
    """2**24 + 1 is 2**24 in fp32: summed from the left the ones would be lost, in pairs they are not."""
    model = nn.Linear(1, 1, bias=False)
    values = [2.0**24, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    gradients = []

    def loss_fn(model, batch):
        return (model.weight * batch).sum() * 8

    trainer = invariant(model, 8, loss_fn)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: gradients.append(next(model.parameters()).grad))
    trainer.run([torch.tensor([each]) for each in values], max_epochs=1)

    tree = [torch.tensor(each) for each in values]
    while len(tree) > 1:
        tree = [left + right for left, right in zip(tree[::2], tree[1::2], strict=True)]
    assert gradients[0].item() == tree[0].item() != sum(map(torch.tensor, values)).item()


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
            model, optimizer, loss_fn, weight_fn=lambda batch: batch[0][0] < 3, rank_invariant=rank_invariant
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


@pytest.mark.row("D17")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: invariant(nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))), "1 is a BatchNorm1d that trains"),
        (lambda: invariant(nn.SyncBatchNorm(3)), "the model is a SyncBatchNorm"),
        (lambda: invariant(nn.DataParallel(nn.Linear(3, 1))), "a DataParallel reduces gradients"),
        (lambda: invariant(nn.Embedding(3, 1, sparse=True)), "the model is a Embedding with sparse gradients"),
        (lambda: invariant(nn.Embedding(3, 1), loss_fn=sparse), "cannot sum sparse gradients"),
        (lambda: invariant(linear(), loss_fn=in_several_parts), "came in several parts in one backward"),
        (lambda: invariant(Counting(in_place=True)), "it changed 'calls'"),
        (lambda: invariant(Counting(in_place=False)), "it changed 'calls'"),
        (lambda: invariant(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))), "0 is a Embedding with max_norm"),
        (lambda: invariant(nn.Sequential(nn.EmbeddingBag(3, 2, max_norm=1.0))), "0 is a EmbeddingBag with max_norm"),
        (lambda: invariant(Drawing(torch.Generator())), "the model is a Drawing with a generator of its own (source)"),
        (lambda: invariant(nn.Sequential(Drawing(random.Random(0)))), "0 is a Drawing with a generator of its own"),
        (lambda: invariant(Drawing(np.random.default_rng(0))), "draw from torch's global generator"),
    ],
)
def test_what_cannot_keep_the_promise_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match="rank_invariant") as raised:
        make().run(numbers_loader(12, 2), max_epochs=1)

    assert message in str(raised.value) and "\n" not in str(raised.value)


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


def test_it_needs_the_size_of_an_iteration_over_all_ranks():
    model = linear()
    update = Update(model, torch.optim.SGD(model.parameters()), mse, rank_invariant=True)

    with pytest.raises(ValueError, match=r"needs the size of an iteration over all ranks: .*global_micro_batches"):
        Trainer(update, 2)
    with pytest.raises(ValueError, match=r"needs Trainer\(update, global_micro_batches=...\), got a Engine"):
        Engine(update).run(numbers_loader(12, 2))
    with pytest.raises(ValueError, match="got both: 2 and 4"):
        Trainer(update, 2, global_micro_batches=4)
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match="global_micro_batches must be a whole number of at least 1"):
            Trainer(update, global_micro_batches=wrong)
