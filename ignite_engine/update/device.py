"""Moves micro-batches to the model's device, one ahead of the one being computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ignite_engine import devices


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter, else of the first buffer; the CPU for a model with neither."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")


def one_ahead(micro_batches: Sequence[Any], device: torch.device) -> Iterator[Any]:
    """The micro-batches on ``device``, in order; each is moved when the one before it is about to be computed.

    Tensors are moved in what torch's pytrees know (dicts, lists, tuples, named tuples and others), in mappings of
    other kinds and in data classes, and so is what has a method ``to`` of its own; the containers are made anew, and
    everything else stays as it is.

    On a device that has side streams tensors are copied on one (``non_blocking``: they overlap only from pinned
    memory, see ``pin_memory`` of the loader); on other devices the host waits for the copy.
    """
    side = _side_stream(device)
    copied: list[Tensor] = []

    def move(value: Any) -> Any:
        # a tensor that is there may be made by what is being computed; of others than plain ones no memory can be kept
        if side is None or type(value) is not Tensor or not value.is_cpu or value.layout is not torch.strided:
            return value.to(device)
        with side:
            copied.append(value.to(device, non_blocking=True))
        return copied[-1]

    following = mapped(micro_batches[0], move) if micro_batches else None
    for index in range(len(micro_batches)):
        batch = following
        if side is not None:
            computing = devices.current_stream(device)
            computing.wait_stream(side)
            for tensor in copied:
                tensor.record_stream(computing)  # else its memory is given to the next copy while it is in use
            copied.clear()
        following = mapped(micro_batches[index + 1], move) if index + 1 < len(micro_batches) else None
        yield batch


@cache
def _side_stream(device: torch.device) -> torch.Stream | None:
    return torch.Stream(device) if devices.has_side_streams(device.type) else None


def mapped(batch: Any, move: Callable[[Any], Any]) -> Any:
    """``batch`` with ``move`` of its tensors, and of what has a method ``to`` and is no mapping."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Mapping):  # Hugging Face's have a ``to`` that changes the host's batch
            return type(value)(mapped(dict(value), move))  # type: ignore[call-arg]  # as Ignite's does
        if isinstance(value, type):
            return value
        if callable(getattr(value, "to", None)):
            return move(value)
        if dataclasses.is_dataclass(value):
            values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            return dataclasses.replace(value, **mapped(values, move))  # type: ignore[type-var]  # no class
        return value

    return tree_map(leaf, batch, is_leaf=lambda value: hasattr(value, "to"))  # a packed sequence is a named tuple, too
