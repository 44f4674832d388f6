"""From the host to the model's device, one micro-batch ahead of the one being computed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ignite_engine import devices


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter, else of the first buffer; the CPU for a model with neither."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")


def to_device(micro_batches: Sequence[Any], device: torch.device, iteration: int | None = None) -> Iterable[Any]:
    """The micro-batches on ``device``, in order.

    Tensors are moved in nested mappings, sequences, named tuples and data classes, and what has a method ``to`` of its
    own; the containers are made anew, and everything else stays as it is. On the CPU they are returned as they are.

    Elsewhere each is moved when the one before it is about to be computed, and none beyond these. On a device that has
    side streams tensors are copied on one (``non_blocking``: they overlap only from pinned memory, see ``pin_memory``
    of the loader); on other devices the host waits for the copy.

    Args:
        iteration: for the note of an error.
    """
    if device.type == "cpu" or not micro_batches:
        return micro_batches
    if device not in _streams:
        _streams[device] = devices.side_stream(device)
    side = _streams[device]
    return _one_ahead(micro_batches, _Mover(device) if side is None else _SideStream(device, side), iteration)


def _one_ahead(micro_batches: Sequence[Any], mover: _Mover, iteration: int | None) -> Iterator[Any]:
    def start(index: int) -> Any:
        try:
            return mover.start(micro_batches[index])
        except Exception as error:
            of = "" if iteration is None else f" of iteration {iteration}"
            error.add_note(f"Raised while micro-batch {index + 1}{of} was moved to {mover.device}.")
            raise

    following = start(0)
    for index in range(len(micro_batches)):
        batch = following
        mover.wait_for(batch)
        following = start(index + 1) if index + 1 < len(micro_batches) else None
        yield batch


class _Mover:
    """Moves batches to a device."""

    _non_blocking = False  # without a second stream such a copy may be of what the host has written there since

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, batch: Any) -> Any:
        """The batch on the device; its copies may not have ended."""
        return mapped(batch, self._tensor, self._object)

    def wait_for(self, batch: Any) -> None:
        """What is computed from now on uses ``batch`` when its copies have ended."""

    def _tensor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=self._non_blocking)

    def _object(self, value: Any) -> Any:
        parameters = inspect.signature(value.to).parameters
        takes_it = "non_blocking" in parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        return value.to(self.device, **({"non_blocking": self._non_blocking} if takes_it else {}))


_streams: dict[torch.device, torch.Stream | None] = {}


class _SideStream(_Mover):
    """Copies tensors from the host on a stream beside the one that computes."""

    _non_blocking = True

    def __init__(self, device: torch.device, side: torch.Stream) -> None:
        super().__init__(device)
        self._side, self._computing = side, devices.current_stream(device)
        self._copied: dict[int, Tensor] = {}

    def start(self, batch: Any) -> Any:
        with self._side:
            return super().start(batch)

    def _tensor(self, tensor: Tensor) -> Tensor:
        # one that is there may be made by what is being computed; of others than plain ones the memory cannot be kept
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or type(tensor) is not Tensor:
            with self._computing:
                return super()._tensor(tensor)
        copied = super()._tensor(tensor)
        self._copied[id(copied)] = copied
        return copied

    def _object(self, value: Any) -> Any:
        with self._computing:
            return super()._object(value)

    def wait_for(self, batch: Any) -> None:
        self._computing.wait_stream(self._side)
        for tensor in self._copied.values():
            tensor.record_stream(self._computing)  # else its memory is given to the next copy while it is in use
        self._copied.clear()


def mapped(batch: Any, tensor: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """``batch`` with ``tensor`` of its tensors, and ``other`` of what has a method ``to`` and is no container."""
    if isinstance(batch, Tensor):
        return tensor(batch)
    if isinstance(batch, str | bytes):
        return batch
    if isinstance(batch, Mapping):
        values = {key: mapped(value, tensor, other) for key, value in batch.items()}
        if type(batch) is dict or all(values[key] is value for key, value in batch.items()):
            return values if type(batch) is dict else batch
        if not isinstance(batch, MutableMapping):
            return type(batch)(values)  # type: ignore[call-arg]  # as Ignite's does
        made = copy.copy(batch)  # with its default factory, and whatever else it holds
        made.update(values)
        return made
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return other(batch)
    if isinstance(batch, Sequence):
        items = [mapped(item, tensor, other) for item in batch]
        if all(new is old for new, old in zip(items, batch, strict=True)):
            return batch
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        anew = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(anew, field.name, mapped(getattr(batch, field.name), tensor, other))  # may be frozen
        return anew
    return batch
