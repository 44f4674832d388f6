"""A model of two sparse tables and a dense layer, its three optimizers, and the loop written by hand."""

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tests.kit.floors import has

if has("sparse"):
    from ignite_engine.ext.sparse import RowwiseAdagrad as OfTables
else:
    from torch.optim import SparseAdam as OfTables

WORDS, ROWS = 20, 30


class Net(nn.Module):
    """A word and a bag of three ids, each with rows of its own; the weights are always the same."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, 4, sparse=True, dtype=dtype)
        self.bags = nn.EmbeddingBag(ROWS, 4, sparse=True, mode="sum", dtype=dtype)
        self.head = nn.Linear(8, 1, dtype=dtype)

    def forward(self, words, ids):
        bags = self.bags(ids.flatten(), torch.arange(len(ids)) * ids.shape[1])
        found = self.head(torch.cat([self.words(words), bags], dim=1))
        return found


def loss_fn(model, batch):
    words, ids, targets = batch
    return (model(words, ids) - targets).square().mean()


def optimizers_of(model):
    return {
        "sparse": torch.optim.SparseAdam(list(model.words.parameters()), lr=0.05),
        "tables": OfTables(model.bags.parameters(), lr=0.1),
        "dense": torch.optim.AdamW(model.head.parameters(), lr=0.01),
    }


def samples(count, dtype=torch.float32):
    """Functions of the count; many ids occur more than once."""
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(0, WORDS, (count,), generator=generator)
    ids = torch.randint(0, ROWS, (count, 3), generator=generator)
    return words, ids, torch.randn(count, 1, generator=generator, dtype=dtype)


def batches(count, size, dtype=torch.float32):
    whole = samples(count * size, dtype)
    return list(zip(*(part.split(size) for part in whole), strict=True))


class Sized:
    """Batches with a length."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def clipped(parameters, max_norm):
    """The norm before it; torch's own clipping refuses sparse gradients. A row that occurs twice counts as one."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    dense = [parameter for parameter in with_gradient if not parameter.grad.is_sparse]
    values = [each.grad.values() if each.grad.is_sparse else each.grad for each in with_gradient]
    norm = get_total_norm(values)
    if max_norm is not None:
        clip_grads_with_norm_(dense, max_norm, norm)
        for parameter, value in zip(with_gradient, values, strict=True):
            if parameter.grad.is_sparse:
                value.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def by_hand(model, groups, *, clip_norm=None, scaler=None, dtype=None, passes=1, optimizers=None, loss_of=loss_fn):
    """Train ``model``, which may be a DistributedDataParallel, as one would without an engine; the norms.

    Args:
        dtype: of autocast, where it is not fp32; with a scaler fp16.
    """
    optimizers = optimizers or optimizers_of(getattr(model, "module", model))
    dtype, norms = torch.float16 if scaler else dtype, []
    held = {id(p) for each in optimizers.values() for group in each.param_groups for p in group["params"]}
    for group in [group for _ in range(passes) for group in groups]:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        for index, batch in enumerate(group):
            if hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = index == len(group) - 1
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_of(model, batch)
            loss = loss * (1 / len(group))
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            for optimizer in optimizers.values():
                scaler.unscale_(optimizer)
        norms.append(clipped([each for each in model.parameters() if id(each) in held], clip_norm))
        for optimizer in optimizers.values():
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    return norms


def values(model):
    """All weights as plain values, which compare bit for bit."""
    return [parameter.detach().tolist() for parameter in model.parameters()]
