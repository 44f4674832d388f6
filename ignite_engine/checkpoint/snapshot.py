"""Copies a run's state into host buffers that are reused for the next copy."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from ignite_engine import devices
from ignite_engine.checkpoint.nested import is_made_of_tensors, rebuilt, rebuilt_of

_Key = tuple[Any, ...]
_Pair = tuple[Tensor, Tensor]
T = TypeVar("T")


class Snapshot:
    """Copies nested states of tensors and plain values; a tensor that occurs twice is copied once.

    The result of :meth:`take` is valid until the next call, which reuses the buffers of tensors with the same shape.
    One host copy of everything is held; in pinned memory for devices that copy asynchronously.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Key, Tensor] = {}
        self._kept: dict[_Key, Tensor] = {}
        self._pairs: list[_Pair] = []
        self._copied: list[torch.Event] = []

    def take(self, state: T) -> T:
        """A copy of ``state``.

        Returns:
            The same structure on the host. Values from a device that copies asynchronously are there once
            :meth:`wait` has returned; what the device computes from now on does not change them.
        """
        self._kept, self._buffers = self._buffers, {}
        copy: T = rebuilt(state, self._copy)
        self._kept = {}
        self._copy_values()
        return copy

    def wait(self) -> None:
        """Wait until every byte is in host memory."""
        for event in self._copied:
            event.synchronize()

    def _copy(self, value: Any) -> Any:
        if is_made_of_tensors(value):
            return rebuilt_of(value, self._copy)
        if isinstance(value, Tensor):
            return self._buffer_for(value.detach())
        return value.copy() if isinstance(value, bytearray) else value

    def _buffer_for(self, source: Tensor) -> Tensor:
        if source.is_meta:  # the placeholder of a sharded tensor, whose pieces are copied
            return source
        if type(source) is not Tensor or source.layout is not torch.strided or source.is_quantized:
            return source.clone()
        key = (source.data_ptr(), source.dtype, source.device, tuple(source.shape), source.stride())
        if key in self._buffers and source.numel():
            return self._buffers[key]
        buffer = self._kept.get(key)
        if buffer is None:
            # keeps the strides: fused kernels give other bits for another memory layout
            buffer = torch.empty_like(source, device="cpu", pin_memory=devices.has_side_streams(source.device.type))
        self._buffers[key] = buffer
        self._pairs.append((buffer, source))
        return buffer

    def _copy_values(self) -> None:
        beside: set[torch.device] = set()
        for buffer, source in self._pairs:
            # other devices have no events that tell when the bytes are there
            non_blocking = devices.has_side_streams(source.device.type)
            buffer.copy_(source, non_blocking=non_blocking)
            if non_blocking:
                beside.add(source.device)
        self._pairs = []
        self._copied = [devices.current_stream(device).record_event() for device in beside]
