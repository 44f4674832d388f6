"""The work of every contender of the overhead benchmark: one tiny model, one optimizer, the same batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]

ACCUMULATION = 4
CLIP_NORM = 1.0
LOG_EVERY = 48  # micro-batches
LEARNING_RATE = 1e-3
WARMUP = 100  # updates
TOTAL = 10_000  # updates
# In updates; no period is a multiple of another: as rare and uneven as real evaluation, saving and reporting.
HANDLER_PERIOD = 500


@dataclass
class Workload:
    """The input of a contender, which trains ``model`` in place.

    Args:
        log: the running loss at each log point; a contender writes only this and the weights.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    epochs: int
    log: list[float] = field(default_factory=list)


class Batches:
    """A sized loader of micro-batches in memory, so that loading takes no time.

    Args:
        gate: called at the start of each pass; in it the benchmark stops its clock and waits for its turn.
    """

    def __init__(self, batches: list[Batch], gate: Callable[[], None] = lambda: None) -> None:
        self.batches = batches
        self.gate = gate

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        self.gate()
        return iter(self.batches)


def build(micro_batches: int, epochs: int, gate: Callable[[], None] = lambda: None) -> Workload:
    """The same work on every call: a 64-128-128-10 perceptron, AdamW, batches of 32, all from one seed.

    Raises:
        ValueError: an epoch of ``micro_batches`` would end within a group or a log interval.
    """
    if micro_batches < 1 or micro_batches % LOG_EVERY:
        raise ValueError(
            f"micro_batches must be a positive multiple of {LOG_EVERY}, got {micro_batches}: "
            "some contenders cannot end on a short group, and all must do equal work."
        )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    # foreach is torch's choice on a GPU; a loop over single tensors is slower and would hide more of the overhead
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)
    # few distinct batches, which fit the caches: the loop is measured, not the memory
    distinct = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(LOG_EVERY)]
    batches = distinct * (micro_batches // LOG_EVERY)
    return Workload(model, optimizer, Batches(batches, gate), epochs)


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
