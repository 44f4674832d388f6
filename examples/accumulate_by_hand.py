"""Gradient accumulation in a hand-written loop: an update per 4 micro-batches, and one for the last group.

    python examples/accumulate_by_hand.py [EPOCHS]

Trains y = 3 x - 1 from 100 samples, 10 micro-batches of 10 an epoch: 3 updates, of 4, 4 and 2 micro-batches.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from ignite_engine.accumulation import initialize
from ignite_engine.handlers import warmup_cosine

ACCUMULATION_STEPS = 4
UPDATES_PER_EPOCH = 3


def train(epochs: int) -> tuple[nn.Linear, list[float]]:
    """The trained model, and the loss of each epoch's last micro-batch."""
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 100).unsqueeze(1)
    loader = DataLoader(TensorDataset(inputs, 3 * inputs - 1), batch_size=10, shuffle=True)
    model = nn.Linear(1, 1)
    bare = AdamW(model.parameters(), lr=0.3)
    schedule = warmup_cosine(bare, warmup=3, total=UPDATES_PER_EPOCH * epochs)
    optimizer, scheduler = initialize(model, bare, schedule, ACCUMULATION_STEPS, precision="bf16")

    last_losses, loss = [], torch.zeros(())
    for _ in range(epochs):
        for samples, targets in loader:
            with optimizer.autocast():
                loss = nn.functional.mse_loss(model(samples), targets)
            optimizer.backward(loss)
            optimizer.clip_gradients(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        optimizer.flush(max_norm=1.0)
        last_losses.append(loss.item())
    assert optimizer.optimizer_steps == UPDATES_PER_EPOCH * epochs
    return model, last_losses


if __name__ == "__main__":
    trained, losses = train(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.5f}, y = {trained.weight.item():.2f} x + {trained.bias.item():.2f}")
