"""A copy of a run's state that training cannot change, in buffers that are reused for the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ignite_engine import devices
from ignite_engine.checkpointing.nested import rebuilt
from ignite_engine.checkpointing.threads import in_threads

_PIECE_BYTES = 1 << 22
"""Bytes that a thread copies at a time."""
_THREADS = 4
"""One does not use the memory's whole bandwidth; torch has one where training has."""
_Key = tuple[Any, ...]
_Pair = tuple[Tensor, Tensor]
T = TypeVar("T")


class Snapshot:
    """Copies nested states (dicts, lists, tuples of tensors and plain values); a tensor twice in them is copied once.

    Each :meth:`take` gives a state that is valid until the next one, in the same memory where shapes are the same:
    one host copy of everything is held, pinned for what is on a device with side streams.

    The copy has two halves. :meth:`take` copies the tensors for which ``late`` is False. :meth:`copy_late` copies the
    rest, in any thread, beside work that only reads it; :meth:`check_untouched` says whether nobody wrote to it
    meanwhile. On a device with side streams the late half runs on one from :meth:`take` on, and :meth:`before_change`
    makes the device's current stream wait for it, not the host.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Key, Tensor] = {}
        self._kept: dict[_Key, Tensor] = {}
        self._at_once: list[_Pair] = []
        self._late: list[_Pair] = []
        self._versions: list[int] = []
        self._copied: list[torch.Event] = []
        self._streams: dict[torch.device, torch.Stream | None] = {torch.device("cpu"): None}

    def take(self, state: T, late: Callable[[Tensor], bool]) -> T:
        """A copy of ``state``; tensors for which ``late`` holds are filled later.

        Returns:
            The same structure on the host. Valid once :meth:`copy_late` and :meth:`wait_for_devices` have returned.
        """
        self._kept, self._buffers = self._buffers, {}
        self._late, self._at_once, self._copied = [], [], []
        copy: T = rebuilt(state, lambda value: self._copy(value, late))
        self._kept = {}
        self._copy_at_once()
        self._versions = [source._version for _, source in self._late]
        self._start_on_devices([*self._at_once, *self._late])
        self._at_once = []
        return copy

    def copy_late(self) -> None:
        """Fill what :meth:`take` left, but for what a side stream copies."""
        for buffer, source in self._late:
            if self._stream_of(source) is None:
                buffer.copy_(source)

    def wait_for_devices(self) -> None:
        """Return once the side streams have copied their part, too: every byte is in host memory."""
        for event in self._copied:
            event.synchronize()

    def before_change(self) -> None:
        """Let the devices' current streams wait until the side streams have read their sources, not the host."""
        for event in self._copied:
            devices.current_stream(event.device).wait_event(event)

    def check_untouched(self) -> bool:
        """Whether nobody has written to a late tensor since :meth:`take`."""
        return self._versions == [source._version for _, source in self._late]

    def release(self) -> None:
        """Forget the sources, so that they can be freed."""
        self._late, self._versions = [], []

    def _copy(self, value: Any, late: Callable[[Tensor], bool]) -> Any:
        if isinstance(value, Tensor):
            return self._buffer_for(value.detach(), late)
        return value.copy() if isinstance(value, bytearray) else value

    def _buffer_for(self, source: Tensor, late: Callable[[Tensor], bool]) -> Tensor:
        if source.is_meta:  # the place of a sharded tensor, whose pieces are copied
            return source
        if type(source) is not Tensor or source.layout is not torch.strided or source.is_quantized:
            return source.clone()
        key = (source.data_ptr(), source.dtype, source.device, tuple(source.shape), source.stride())
        if key in self._buffers and source.numel():
            return self._buffers[key]
        buffer = self._kept.get(key)
        if buffer is None:
            # with the strides of the source: fused kernels give other bits for another memory layout
            buffer = torch.empty_like(source, device="cpu", pin_memory=self._stream_of(source) is not None)
        self._buffers[key] = buffer
        (self._late if late(source) else self._at_once).append((buffer, source))
        return buffer

    def _stream_of(self, source: Tensor) -> torch.Stream | None:
        """The side stream of its device; None: a copy is waited for."""
        if source.device not in self._streams:
            self._streams[source.device] = devices.side_stream(source.device)
        return self._streams[source.device]

    def _start_on_devices(self, pairs: list[_Pair]) -> None:
        """The late copies on side streams, and an event after all copies of each device."""
        for device in {source.device for _, source in pairs if self._stream_of(source) is not None}:
            stream = self._streams[device]
            assert stream is not None
            stream.wait_stream(devices.current_stream(device))
            with stream:
                for buffer, source in self._late:
                    if source.device == device:
                        buffer.copy_(source, non_blocking=True)
                        source.record_stream(stream)
                self._copied.append(stream.record_event())

    def _copy_at_once(self) -> None:
        """Training waits for it, so several threads copy what is on the CPU and large."""
        pieces: list[_Pair] = []
        for buffer, source in self._at_once:
            if source.device.type == "cpu" and source.nbytes > _PIECE_BYTES:
                rows = max(1, _PIECE_BYTES * len(source) // source.nbytes)
                pieces += zip(buffer.split(rows), source.split(rows), strict=True)
            else:
                # of other devices no event would say when the bytes are there
                buffer.copy_(source, non_blocking=self._stream_of(source) is not None)
        in_threads(lambda pair: pair[0].copy_(pair[1]), pieces, _THREADS)
