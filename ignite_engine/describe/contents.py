"""What a checkpoint will hold, in bytes, and the memory that training takes."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine.checkpointing import SaveOptions
from ignite_engine.states.model_and_optimizer import OptimizerState, unwrap
from ignite_engine.states.registry import Registry

_NOT_ASKED = ("data", "trainer")  # a few numbers, and the state of a loader may start its workers


@dataclass(frozen=True)
class Size:
    """Bytes of the tensors of one part of a checkpoint.

    Attributes:
        now: of the tensors that exist.
        later: of the tensors that the first step makes; None: an optimizer does not tell.
    """

    now: int
    later: int | None = 0

    @property
    def whole(self) -> int:
        return self.now + (self.later or 0)

    def __str__(self) -> str:
        if self.later is None:
            return f"{self.now:,} bytes, more after the first step" if self.now else "known after the first step"
        return f"{self.whole:,} bytes" + (" after the first step" if self.later else "")


def part_sizes(registry: Registry, options: SaveOptions | None = None) -> dict[str, Size]:
    """The size of each part that has tensors, without what ``options`` leave out."""
    sizes = {}
    for name, obj in registry.objects.items():
        if name in _NOT_ASKED:
            continue
        state = {name: obj.state_dict()}
        kept = state if options is None else options.filter(state, registry.kinds)[0]
        now = bytes_of(kept)
        later = optimizer_bytes_later(obj.optimizer) if isinstance(obj, OptimizerState) and name in kept else 0
        size = Size(now, later)
        if size.whole or size.later is None:
            sizes[name] = size
    return sizes


def bytes_of(state: Any) -> int:
    """Bytes of all tensors in nested states; a sharded tensor counts whole."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if not isinstance(state, Mapping | list | tuple):
        return 0
    return sum(bytes_of(value) for value in (state.values() if isinstance(state, Mapping) else state))


def optimizer_bytes_later(optimizer: Optimizer) -> int | None:
    """Bytes of the state that the first step of an optimizer makes, 0 if it was made; None: it cannot be tried.

    A twin of the optimizer makes a step on parameters without memory.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    waiting = {
        id(parameter) for parameter in parameters if parameter.requires_grad and not optimizer.state.get(parameter)
    }
    if not waiting:
        return 0
    taken = inspect.signature(type(optimizer).__init__).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in taken}
    on_a_device = {"fused": None, "capturable": False}  # which a twin without memory has not
    options |= {key: value for key, value in on_a_device.items() if key in options}
    groups = []
    for group in optimizer.param_groups:
        twins = [
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            for parameter in group["params"]
            if id(parameter) in waiting
        ]
        own = {key: on_a_device.get(key, value) for key, value in group.items() if key != "params"}
        if twins:
            groups.append({**own, "params": [twin.requires_grad_() for twin in twins]})
    try:
        twin = type(optimizer)(groups, **options)
        for group in twin.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        twin.step()
    except Exception:  # a user's optimizer may need what a twin does not have
        return None
    return bytes_of(list(twin.state.values()))


@dataclass(frozen=True)
class Memory:
    """Bytes and numbers of one rank, without activations."""

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: Size
    averages: int


def memory_of(registry: Registry, models: Iterable[nn.Module]) -> Memory:
    """Memory of the trained models, and of the registered optimizers and averages."""
    parameters = list(dict.fromkeys(parameter for model in models for parameter in unwrap(model).parameters()))
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    buffers = dict.fromkeys(buffer for model in models for buffer in unwrap(model).buffers())
    optimizers = [obj.optimizer for obj in registry.objects.values() if isinstance(obj, OptimizerState)]
    later = [optimizer_bytes_later(optimizer) for optimizer in optimizers]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    now = bytes_of([_local(value) for state in states for value in state.values()])
    averages = [obj for name, obj in registry.objects.items() if registry.kinds[name] == "average"]
    return Memory(
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in trained),
        bytes_of([_local(tensor) for tensor in (*parameters, *buffers)]),
        bytes_of([_local(parameter) for parameter in trained]),
        Size(now, None if None in later else sum(size or 0 for size in later)),
        sum(bytes_of(average.state_dict()) for average in averages),
    )


def kept_at_once(options: SaveOptions, saves: int | None, iterations: int | None) -> tuple[int, list[str]]:
    """The most checkpoints on disk at once, and which they are.

    Args:
        saves: how many the run makes; None: unknown.
    """
    best = options.keep_best if options.best else 0
    forever = iterations // options.keep_every if options.keep_every and iterations else 0
    named = [(options.keep_last, "last"), (best, "best"), (forever, f"of every {options.keep_every}"), (1, "in flight")]
    count = sum(number for number, _ in named)
    words = [f"{number:,} {name}" for number, name in named if number]
    return (count if saves is None or best else min(count, saves)), words


def free_bytes(directory: Path) -> int | None:
    """Free on the file system of a directory that may not exist yet."""
    for candidate in (directory.absolute(), *directory.absolute().parents):
        try:
            return shutil.disk_usage(candidate).free
        except OSError:
            continue
    return None


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value
