"""A micro-batch that does not fit into memory: how it is split, and the error where it is not."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ignite_engine import devices
from ignite_engine.errors import one_line
from ignite_engine.ranks import agreement
from ignite_engine.step.device import mapped
from ignite_engine.step.micro_batches import WeightFn

NEVER_ON = frozenset({"cpu"})
"""Devices whose allocator does not raise ``torch.OutOfMemoryError``: no update captures generators for it."""


class Generators:
    """torch's random number generators as they are now: of the CPU, and of the model's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_host, self._of_device = torch.get_rng_state(), devices.generator_state(device)

    def restore(self) -> None:
        torch.set_rng_state(self._of_host)
        if self._of_device is not None:
            devices.set_generator_state(self._device, self._of_device)


def split(
    micro_batches: Sequence[Any], scales: Sequence[float], limit: int, weight_fn: WeightFn | None
) -> tuple[list[Any], list[float]]:
    """Micro-batches of at most ``limit`` samples, and their scales: together the same weighted mean.

    Args:
        scales: of the whole micro-batches; a part has a share by ``weight_fn``, or by its samples.
    """
    pieces: list[Any] = []
    shares: list[float] = []
    for batch, scale in zip(micro_batches, scales, strict=True):
        count = samples_of(batch) or 0
        parts = -(-count // limit)
        if parts < 2 or not scale:
            pieces.append(batch)
            shares.append(scale)
            continue
        bounds = [count * part // parts for part in range(parts + 1)]
        own = [_part(batch, start, end, count) for start, end in pairwise(bounds)]
        sizes = [end - start for start, end in pairwise(bounds)]
        weights = [float(size) for size in sizes] if weight_fn is None else [float(weight_fn(piece)) for piece in own]
        total = sum(weights)
        kept = [(piece, scale * weight / total) for piece, weight in zip(own, weights, strict=True) if weight]
        pieces += [piece for piece, _ in kept]
        shares += [share for _, share in kept]
    return pieces, shares


def samples_of(batch: Any) -> int | None:
    """The size of dimension 0, where all tensors of a batch have the same; None: it cannot be split."""
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def halved(batch: Any) -> int | None:
    """The samples of the larger half of a batch; None: it has no halves."""
    count = samples_of(batch)
    return -(-count // 2) if count is not None and count > 1 else None


def free() -> None:
    """Return what the failed attempt has left to the device."""
    gc.collect()
    devices.free_cached_memory()


def report(batch: Any, limit: int, iteration: int, model: nn.Module) -> str:
    """The line that says what is done about it."""
    norms = any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
    return (
        f"Out of memory in iteration {iteration} with a micro-batch of shapes {shapes_of(batch)}: the step is done "
        f"again, and micro-batches of more than {limit} samples are split from now on"
        f"{', each part with its own statistics in BatchNorm' if norms else ''}. A smaller batch_size with more "
        "accumulation_steps costs no second attempt."
    )


def refusal(error: torch.OutOfMemoryError, batch: Any, iteration: int) -> torch.OutOfMemoryError:
    """The error of a micro-batch that is not split, with its rank, iteration and shapes."""
    if agreement.world_size() > 1:
        where, why = f" on rank {agreement.rank()}", "on several ranks none is split"
    elif samples_of(batch) == 1:
        where, why = "", "one sample cannot be split"
    elif samples_of(batch) is None:
        where, why = "", "it cannot be split, as its tensors have no dimension 0 of one size"
    else:
        where, why = "", "under DDP, FSDP2 and rank_invariant none is split"
    return torch.OutOfMemoryError(
        f"Out of memory{where} in iteration {iteration} with a micro-batch of shapes {shapes_of(batch)}, and {why}: "
        f"use a smaller batch_size with more accumulation_steps. {one_line(error)}"
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _part(batch: Any, start: int, end: int, count: int) -> Any:
    """Samples ``start`` to ``end - 1``; what has none of its own is the same in each part."""
    if isinstance(batch, Tensor):
        return batch[start:end] if batch.dim() else batch
    if isinstance(batch, Mapping):
        parts = {key: _part(value, start, end, count) for key, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]  # as Ignite's does
    if isinstance(batch, list | tuple):
        if len(batch) == count and next(_tensors(batch), None) is None:
            return batch[start:end]  # such as the names of the samples
        values = [_part(value, start, end, count) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def shapes_of(batch: Any) -> str:
    """The shapes of its tensors, in words."""
    shapes: list[str] = []
    mapped(
        batch, lambda tensor: shapes.append(str(tuple(tensor.shape))), lambda other: shapes.append(type(other).__name__)
    )
    return ", ".join(shapes) if shapes else f"none ({type(batch).__name__})"
