"""From the host to the model's device, one micro-batch ahead of the one being computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from ignite.utils import convert_tensor
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter, else of the first buffer; the CPU for a model with neither."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")


def to_device(micro_batches: Sequence[Any], device: torch.device) -> Iterable[Any]:
    """The micro-batches on ``device``, in order; tensors in nested lists, tuples and mappings are moved.

    On the CPU they are returned as they are. On CUDA each is copied on a side stream while the one before it is
    computed (``non_blocking``: it overlaps only from pinned memory, see ``pin_memory`` of the loader).
    """
    if device.type == "cpu" or not micro_batches:
        return micro_batches
    if device.type == "cuda":
        return _ahead(micro_batches, device)
    return (convert_tensor(batch, device=device, non_blocking=True) for batch in micro_batches)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _ahead(micro_batches: Sequence[Any], device: torch.device) -> Iterator[Any]:
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    current = torch.cuda.current_stream(device)

    def copy(batch: Any) -> Any:
        with torch.cuda.stream(stream):
            return convert_tensor(batch, device=device, non_blocking=True)

    following = copy(micro_batches[0])
    for index in range(len(micro_batches)):
        batch = following
        current.wait_stream(stream)
        _record(batch, current)
        if index + 1 < len(micro_batches):
            following = copy(micro_batches[index + 1])
        yield batch


def _record(batch: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that ``stream`` uses these tensors, made on another one."""
    if isinstance(batch, torch.Tensor):
        batch.record_stream(stream)
    elif isinstance(batch, dict):
        for value in batch.values():
            _record(value, stream)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            _record(value, stream)
