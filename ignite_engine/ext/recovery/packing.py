"""A nested state as one run of bytes: a pickle of its structure, then the memories of its tensors.

Writing is a copy of each memory and little else, which ``torch.save`` is not. Reading executes nothing: the pickle may
name the few types that a checkpoint can hold, and no others.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ignite_engine.checkpointing.memories import compacted
from ignite_engine.checkpointing.plain_data import tensors_of
from ignite_engine.checkpointing.shards import is_placeholder
from ignite_engine.errors import CheckpointError, one_line

_ALIGNMENT = 64
_LENGTH_BYTES = 8
_TYPES = {
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "set"): set,
    ("collections", "Counter"): Counter,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
}


class Packed:
    """A state that is about to be copied into memory.

    Args:
        facts: numbers, texts, lists and dicts.
        parts: plain data by name, as a checkpoint holds it; it is not changed.

    Raises:
        CheckpointError: a value cannot be saved; names it.
    """

    def __init__(self, facts: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        copies, _ = compacted([leaf.value for leaf in tensors_of(parts, is_placeholder)])
        structure = io.BytesIO()
        pickler = _Pickler(structure, copies)
        pickler.dump((dict(facts), dict(parts)))
        self._structure = structure.getbuffer()
        self._begin = _aligned(_LENGTH_BYTES + len(self._structure))
        self._memories, self._copies = pickler.memories, copies  # which must live until they are written
        self.bytes = self._begin + pickler.bytes
        """How much room it needs."""

    def write(self, room: memoryview) -> None:
        """Copy it to the beginning of ``room``, which must be large enough."""
        room[:_LENGTH_BYTES] = len(self._structure).to_bytes(_LENGTH_BYTES, "little")
        room[_LENGTH_BYTES : _LENGTH_BYTES + len(self._structure)] = self._structure
        address = ctypes.addressof(ctypes.c_char.from_buffer(room)) + self._begin
        for offset, memory in self._memories:
            ctypes.memmove(address + offset, memory.data_ptr(), memory.nbytes())


def unpack(room: memoryview, *, in_place: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts and parts that :meth:`Packed.write` has written, tensors on the CPU in memories of their own.

    Args:
        in_place: the tensors stay in ``room``, so that only what is used of them is read.

    Raises:
        CheckpointError: one line; it is something else, of which nothing was executed.
    """
    length = int.from_bytes(room[:_LENGTH_BYTES], "little")
    begin = _aligned(_LENGTH_BYTES + length)
    try:
        facts, parts = _Unpickler(room[_LENGTH_BYTES : _LENGTH_BYTES + length], room[begin:], in_place).load()
    except Exception as error:  # pickle raises errors of many types
        raise CheckpointError(f"What is in memory is not the state of a run: {one_line(error)}.") from error
    return facts, parts


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    """Collects the memories of tensors and writes their places."""

    def __init__(self, file: io.BytesIO, copies: Mapping[int, Tensor]) -> None:
        super().__init__(file, protocol=5)
        self.memories: list[tuple[int, torch.UntypedStorage]] = []
        self.bytes = 0
        self._copies = copies
        self._places: dict[tuple[torch.device, int], tuple[int, int]] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        value = self._copies.get(id(value), value)
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_conj() or value.is_neg():
            return _as_saved, (_saved(value),)
        place = self._place_of(value.untyped_storage())
        view = (value.dtype, value.storage_offset(), tuple(value.shape), value.stride())
        return _tensor, (*place, *view, type(value) is Parameter, value.requires_grad)

    def _place_of(self, memory: torch.UntypedStorage) -> tuple[int, int]:
        """Offset and size of a memory; two tensors that share it get the same."""
        size = memory.nbytes()
        if not size:
            return 0, 0
        key = (memory.device, memory.data_ptr())
        if key not in self._places:
            self._places[key] = self.bytes, size
            self.memories.append((self.bytes, memory if memory.device.type == "cpu" else memory.cpu()))
            self.bytes += _aligned(size)
        return self._places[key]


class _Unpickler(pickle.Unpickler):
    """Gives tensors the memories at their places, each copied once; refuses every name that is not among those few."""

    def __init__(self, structure: memoryview, room: memoryview, in_place: bool) -> None:
        super().__init__(io.BytesIO(structure))
        self._room, self._in_place = room, in_place
        self._memories: dict[int, torch.UntypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _TYPES:
            return _TYPES[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == (__name__, _tensor.__name__):
            return self._tensor
        if (module, name) == (__name__, _as_saved.__name__):
            return _as_saved
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    def _tensor(self, offset: int, size: int, *view: Any) -> Tensor:
        if not size:
            return _tensor_in(torch.UntypedStorage(0), *view)
        if offset not in self._memories:
            if offset < 0 or offset + size > len(self._room):
                raise pickle.UnpicklingError("it is shorter than its tensors are")
            values = torch.frombuffer(self._room[offset : offset + size], dtype=torch.uint8)
            if not self._in_place:
                values = values.clone()
            self._memories[offset] = values.untyped_storage()
        return _tensor_in(self._memories[offset], *view)


def _tensor(*place: Any) -> Tensor:
    """Names a tensor in the pickle; only an :class:`_Unpickler` has the memories."""
    raise NotImplementedError


def _tensor_in(
    memory: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    is_parameter: bool,
    requires_grad: bool,
) -> Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(memory, offset, shape, stride)
    return Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _saved(value: Tensor) -> bytes:
    """A tensor that has more than one memory, or none, or is seen otherwise than it is stored."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _as_saved(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
