"""The work of every contender of the overhead benchmark: one tiny model, one optimizer, the same batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

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


# -- a model whose state is large, for saves --------------------------------------------------------------------------


class Training:
    """12 linear layers and an AdamW that has stepped once; width 2048: 50M parameters, 604 MB with their state."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(width, width), nn.ReLU())))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.batches = [torch.randn(32, width) for _ in range(8)]
        self.loss_fn(self.model, self.batches[0]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @staticmethod
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        output: Tensor = model(batch)
        return output.square().mean()

    def state(self) -> dict[str, Any]:
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(self.state()))

    def load(self, state: dict[str, Any]) -> None:
        """As a script does."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def forget(self) -> None:
        """Other numbers everywhere, in memory of its own: an optimizer keeps the tensors that it loads."""
        for tensor in self.model.state_dict().values():
            tensor.fill_(-1.0)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                state[name] = torch.empty_like(value).fill_(-1.0)


def tensors_of(state: Any) -> list[Tensor]:
    """In the order of ``state``, dicts and lists within each other."""
    if isinstance(state, Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for child in children for tensor in tensors_of(child)]
