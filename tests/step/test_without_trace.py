"""What a forward that only the peers need leaves behind: gradients."""

from __future__ import annotations

import torch
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_engine import Update
from ignite_engine.step.without_trace import without_trace


class Mean(nn.Module):
    """Keeps a running mean in a buffer that it replaces."""

    mean: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs):
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.mean


def test_generators_and_buffers_are_as_before_and_gradients_are_there():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Mean(), nn.Dropout(0.5))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    objects, generator = dict(model.named_buffers()), torch.get_rng_state()
    with without_trace(model):
        (model(torch.randn(8, 3)).square().sum() * 2).backward()
        assert any(not torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())

    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(buffer is objects[name] for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), generator)
    assert model[0].weight.grad.abs().sum() > 0


def test_a_rank_without_a_batch_beside_peers_that_reduce_by_hooks_leaves_none_either():
    """No wrapper reduces the gradients of its model, but its peers wait for it."""
    model = nn.Sequential(nn.Embedding(3, 4, sparse=True), Mean())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).sum())
    engine, batch = Engine(update), torch.tensor([0, 2])
    engine.run([batch])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    engine.state.padding = 1
    update.accumulate(engine, [batch], [0.0])

    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert model[0].weight.grad._nnz() == 0
