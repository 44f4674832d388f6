"""Runs that are the same on every device, and what a test changes of them."""

import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import Numbers, mse

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
SECOND = torch.device(DEVICE.type, torch.accelerator.device_count() - 1) if DEVICE.type != "cpu" else DEVICE
"""The last device; the first one is current."""


class Split(nn.Module):
    """A half on each of two devices."""

    def __init__(self, first, second):
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.BatchNorm1d(8)).to(first)
        self.upper = nn.Linear(8, 1).to(second)
        self.second = second

    def forward(self, inputs):
        out = self.upper(self.lower(inputs).to(self.second)).to(inputs.device)
        return out


def net(device, *, dropout=0.0):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).to(device)


def trainer_of(model, *, steps=2, loss_fn=mse, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)  # in the order of the CPU's
    return Trainer(Update(model, optimizer, loss_fn, **options), steps)


def data(*, pinned=True, batch_size=4, count=40):
    return loader(Numbers(count), batch_size, shuffle=True, pin_memory=pinned)


def bits(model):
    return [tensor.detach().cpu().clone() for tensor in model.state_dict().values()]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def run_saved(model, folder, until, *, background=True, **options):
    """Train on from the newest checkpoint, saving each iteration."""
    trainer = trainer_of(model, **options)
    checkpoint = Checkpoint(folder, keep_last=50, background=background)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
    checkpoint.resume()
    trainer.run(data(), max_iters=until)
    return checkpoint
