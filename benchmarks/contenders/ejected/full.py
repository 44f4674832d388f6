"""The run full (full.yaml) in plain PyTorch, written by `ignite-engine eject`.

The last line printed is the SHA-256 of the weights, as `weights_sha256` in the run's summary.json.
Left out, as no weight depends on it: evaluation, checkpoints, logging.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import TensorDataset, default_collate

# The task: what training needs of it, as it is written there.


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build(options: Mapping[str, Any]) -> dict:
    """The perceptron of `benchmarks/workload.py`, and as many samples as it has."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    samples = TensorDataset(torch.randn(1536, 64), torch.randint(10, (1536,)))
    return dict(
        model=model,
        loss_fn=loss_fn,
        train_set=samples,
        optimizer=lambda model: AdamW(model.parameters(), lr=1e-3, foreach=True),
    )


# The run.

TASK_OPTIONS = {}
SEED = 0
ITERATIONS = 10000
BATCH_SIZE = 32
ACCUMULATION_STEPS = 4


def mix(*numbers):
    """A seed from several numbers: the SplitMix64 finaliser, Steele, Lea and Flood 2014."""
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) % 2**64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        value ^= value >> 31
    return value


def seed_generators(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class Epoch:
    """Batches of an epoch, in an order by (seed, epoch); what a sample draws is by (seed, epoch, index)."""

    def __init__(self, data, number):
        self.data, self.number = data, number
        generator = torch.Generator().manual_seed(mix(SEED, number) >> 1)
        self.order = torch.randperm(len(data), generator=generator).tolist()

    def __len__(self):
        return math.ceil(len(self.order) / BATCH_SIZE)

    def __getitem__(self, number):
        indices = list(self.order[number * BATCH_SIZE : (number + 1) * BATCH_SIZE])
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        samples = []
        for index in indices:
            seed_generators(mix(SEED, self.number, index))
            samples.append(self.data[index])
        seed_generators(mix(SEED, self.number, indices[0], 1))
        batch = default_collate(samples)
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        return batch


def updates(data):
    """The micro-batches of each update, epoch after epoch."""
    for number in itertools.count():
        epoch = Epoch(data, number)
        batches = map(epoch.__getitem__, range(len(epoch)))
        while group := list(itertools.islice(batches, ACCUMULATION_STEPS)):
            yield group


def rate(update):
    """The rate over the optimizer's: a warm-up of 100 updates, then half a cosine to 0."""
    if update < 100:
        return (update + 1) / 100
    progress = min((update - 100) / 9900, 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def weights_sha256(model):
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + b"\0")
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def main():
    seed_generators(SEED)
    parts = build(TASK_OPTIONS)
    model, loss_fn = parts["model"].train(), parts["loss_fn"]
    seed_generators(SEED)  # dropout does not depend on what the model has drawn
    optimizer = parts["optimizer"](model)
    base_rates = [group["lr"] for group in optimizer.param_groups]
    logged = []
    data = parts["train_set"]
    for iteration, group in enumerate(itertools.islice(updates(data), ITERATIONS)):
        for parameter_group, base_rate in zip(optimizer.param_groups, base_rates):
            parameter_group["lr"] = base_rate * rate(iteration)
        for batch in group:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_fn(model, batch)
            logged.append(loss.detach())
            (loss * (1 / len(group))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (iteration + 1) % 12 == 0:
            print(f"iteration {iteration + 1}, loss {torch.stack(logged).mean().item():.6g}", flush=True)
            logged.clear()
    print(weights_sha256(model))


if __name__ == "__main__":
    main()
