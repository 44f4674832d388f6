"""A nested state as one safetensors file: its tensors by name, and everything else as JSON in its header.

``safetensors.torch.load_file`` opens it. A file on disk and a slot of shared memory hold the same bytes, and to read
them executes nothing. A tensor is stored contiguous, under its path in the state; its strides are kept, and tensors
that are the same view of one memory are one again.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import mmap
import os
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from blake3 import blake3
from torch import Tensor
from torch.nn.parameter import is_lazy

from ignite_engine.checkpoint.filesystem import (
    PIECE_BYTES,
    FileRecord,
    hash_file,
    open_regular,
    read_into,
)
from ignite_engine.checkpoint.nested import (
    MAX_DEPTH,
    dotted,
    is_made_of_tensors,
    known_class,
    name_of_class,
    put_together,
    refused,
    taken_apart,
)
from ignite_engine.errors import CheckpointError, one_line

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""The names of types in safetensors; tensors of other types are stored as bytes."""
_OF_NAMES = {name: dtype for dtype, name in DTYPES.items()}
_KIND, _TREE, _METADATA, _SUBCLASS = "~", "~tree", "__metadata__", "subclass"
_LARGEST_TREE = 1 << 20
"""A larger tree, in bytes, is stored as a tensor: safetensors refuses headers above 100 MB."""
_COMPONENTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_AS_TEXT = frozenset((float, torch.dtype, torch.device))
_AS_JSON = frozenset((type(None), bool, int, str))
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "Size": torch.Size}
_BYTES: dict[str, Any] = {"bytes": bytes, "bytearray": bytearray}


class Pack:
    """A state that is about to be written.

    It refers to the tensors. Only those that are not contiguous are copied, when they are written.

    Args:
        about: further metadata for the header.

    Raises:
        CheckpointError: names the first value that is not plain data, by its path in the state.
    """

    def __init__(self, state: Any, about: Mapping[str, str] = MappingProxyType({})) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._known: dict[Any, str] = {}
        self._tied: dict[str, str] = {}
        """By name of a tied tensor, the name under which it is stored, as in ``safetensors.torch.save_model``."""
        tree = json.dumps(self._encoded(state, ()))
        about = {"format": "pt", **about, **self._tied, "tree": tree}
        if len(tree) > _LARGEST_TREE:
            self._tensors[_TREE] = torch.frombuffer(bytearray(tree, "ascii"), dtype=torch.uint8)
            del about["tree"]
        # large elements first, so that each tensor is aligned
        self._stored = dict(sorted(self._tensors.items(), key=lambda item: -item[1].element_size()))
        header: dict[str, Any] = {_METADATA: about}
        size = 0
        for name, value in self._stored.items():
            dtype = DTYPES.get(value.dtype)
            shape = [value.nbytes] if dtype is None else [*value.shape]
            offsets = [size, size := size + value.nbytes]
            header[name] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = struct.pack("<Q", len(text)) + text
        self.bytes = len(self._header) + size

    def blocks(self) -> Iterator[memoryview]:
        """All bytes, in order; use each block before asking for the next."""
        yield memoryview(self._header)
        for value in self._stored.values():
            if value.numel():
                yield _bytes_of(value)

    def write(self, room: memoryview) -> None:
        """Copy all bytes to the beginning of a buffer, which must be large enough."""
        at = 0
        for block in self.blocks():
            room[at : at + len(block)] = block
            at += len(block)

    def _encoded(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in _AS_JSON or (kind is float and math.isfinite(value)):
            return value
        if isinstance(value, Tensor):
            return self._encoded_tensor(value, path)
        if kind is list:
            return [self._encoded(child, (*path, index)) for index, child in enumerate(value)]
        if kind is dict and all(type(key) is str for key in value) and _KIND not in value:
            return {key: self._encoded(child, (*path, key)) for key, child in value.items()}
        if len(path) > MAX_DEPTH:
            raise refused(path[:3], f"nested more than {MAX_DEPTH} deep, or contains itself.")
        of: Any
        if kind is _MAPPINGS.get(kind.__name__):
            of = [
                [self._encoded(key, (*path, key)), self._encoded(child, (*path, key))] for key, child in value.items()
            ]
            if versions := getattr(value, "_metadata", None):  # of a module's state_dict
                return {_KIND: kind.__name__, "of": of, "metadata": self._encoded(versions, path)}
        elif kind is _SEQUENCES.get(kind.__name__):
            of = [self._encoded(child, (*path, index)) for index, child in enumerate(value)]
        elif isinstance(value, Enum):
            return {_KIND: "enum", "of": [name_of_class(value), value.name]}
        elif kind is complex:
            of = [self._encoded(value.real, path), self._encoded(value.imag, path)]
        elif kind is _BYTES.get(kind.__name__):
            of = base64.b64encode(value).decode()
        elif kind in _AS_TEXT:
            of = str(value)
        else:
            raise refused(path, _not_held(kind))
        return {_KIND: kind.__name__, "of": of}

    def _encoded_tensor(self, value: Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        if is_lazy(value):
            raise refused(
                path,
                "a parameter of a lazy module, which has no values yet: call the model on a batch before training.",
            )
        if hasattr(value, "device_mesh"):  # DTensors in the parts of a run are replaced before this
            raise refused(path, _not_held(type(value)))
        if is_made_of_tensors(value):
            tensors, context = taken_apart(value)
            of: dict[str, Any] = {_SUBCLASS: name_of_class(value), "tensors": tensors}
            of |= {"context": context, "shape": tuple(value.shape), "stride": tuple(value.stride())}
            try:
                return {_KIND: "subclass", "of": self._encoded(of, path)}
            except CheckpointError as error:
                left_out = f"{path[0]}:{dotted(path[1:])}"
                raise refused(
                    path,
                    f"a {type(value).__qualname__}, which a checkpoint cannot hold: leave it, if it is not trained, "
                    f"out by Checkpoint(exclude=[{left_out!r}]).",
                ) from error
        about: dict[str, Any] = {_KIND: "tensor"}
        if type(value) is torch.nn.Parameter:
            about["is_parameter"] = True
        elif type(value) is not Tensor:  # such as MONAI's MetaTensor, whose metadata is not saved
            value = value.as_subclass(Tensor)
        if value.requires_grad:
            about["requires_grad"], value = True, value.detach()
        if value.is_quantized or not (value.layout is torch.strided or value.layout in _COMPONENTS):
            what = "quantized" if value.is_quantized else str(value.layout)
            raise refused(path, f"a {what} tensor, which a checkpoint cannot hold.")
        if value.is_meta or value.layout is not torch.strided or value.dtype not in DTYPES:
            about |= {"dtype": str(value.dtype), "shape": [*value.shape]}
        if value.is_meta:
            return about
        if value.layout is not torch.strided:
            parts = [getattr(value, name)() for name in _COMPONENTS[value.layout]]
            about["of"] = [self._encoded(part, (*path, index)) for index, part in enumerate(parts)]
            about |= {"layout": str(value.layout), "is_coalesced": value.is_sparse and value.is_coalesced()}
            return about
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        if not value.is_contiguous():  # clone()'s strides: fused kernels give other bits for another layout
            about["stride"] = [*torch.empty_like(value, device="meta").stride()]
        key = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
        base = dotted(path)
        name = self._known.get(key) if value.numel() else None
        if name is not None:
            self._tied[base] = name
        else:
            name = base
            for number in itertools.count(2):
                if name not in self._tensors and name != _METADATA:
                    break
                name = f"{base}{_KIND}{number}"
            self._known[key], self._tensors[name] = name, value
        return about | {"at": name}


def _not_held(kind: type) -> str:
    return (
        f"a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: return tensors, numbers, strings, "
        "lists and dicts from state_dict() instead."
    )


def _bytes_of(value: Tensor) -> memoryview:
    """The bytes of a tensor in the order of its elements, on the CPU."""
    values: Any = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(values)


# -- reading --------------------------------------------------------------------------------------------------------


def _read(next_bytes: Callable[[int], Any], size: int) -> Any:
    """Decode the state in ``size`` bytes.

    Args:
        next_bytes: returns the next ``n`` bytes.

    Raises:
        Exception: of any type; the bytes are not a pack.
    """
    (length,) = struct.unpack("<Q", next_bytes(8))
    if length > size - 8:
        raise ValueError("it is shorter than its header says")
    header = json.loads(bytes(next_bytes(length)))
    about = header.pop(_METADATA)
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, entry in header.items():
        dtype, shape, (begin, stop) = _OF_NAMES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if begin != end or stop - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the place of {name} is not that of a tensor of its shape")
        end = stop
        values = torch.frombuffer(next_bytes(stop - begin), dtype=torch.uint8) if stop > begin else torch.empty(0)
        tensors[name] = values.view(dtype).view(shape) if stop > begin else torch.empty(shape, dtype=dtype)
    tree = bytes(tensors[_TREE].numpy()) if _TREE in tensors else about["tree"]
    return _Decoder(tensors).decoded(json.loads(tree))


class _Decoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def decoded(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decoded(child) for child in value]
        if not isinstance(value, dict):
            return value
        if (kind := value.get(_KIND)) is None:
            return {key: self.decoded(child) for key, child in value.items()}
        if kind == "tensor":
            tensor = self._tensor(value)
            requires_grad = value.get("requires_grad", False)
            if value.get("is_parameter"):
                return torch.nn.Parameter(tensor, requires_grad)
            return tensor.requires_grad_(requires_grad)
        of = value["of"]
        if kind == "subclass":
            return _of_its_class(self.decoded(of))
        if kind in _MAPPINGS:
            mapping = _MAPPINGS[kind]({self.decoded(key): self.decoded(child) for key, child in of})
            if "metadata" in value:
                mapping._metadata = self.decoded(value["metadata"])
            return mapping
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.decoded(of))
        if kind in _BYTES:
            return _BYTES[kind](base64.b64decode(of))
        if kind == "enum":  # its name, if the class is not imported
            return getattr(known_class(of[0], Enum), of[1], of[1])
        if kind == "complex":
            return complex(*self.decoded(of))
        plain: dict[str, Callable[[str], Any]] = {"float": float, "dtype": _dtype, "device": torch.device}
        return plain[kind](of)

    def _tensor(self, value: dict[str, Any]) -> Tensor:
        if "of" in value:
            return self._sparse(value)
        if "at" not in value:
            return torch.empty(value["shape"], dtype=_dtype(value["dtype"]), device="meta")
        name = value["at"]
        stored = self._tensors[name]
        if "dtype" in value and (dtype := _dtype(value["dtype"])) != stored.dtype:
            stored = self._tensors[name] = stored.view(dtype).view(value["shape"])
        if (stride := value.get("stride")) and stored.is_contiguous() and [*stored.stride()] != stride:
            laid_out = torch.empty_strided(stored.shape, stride, dtype=stored.dtype)
            stored = self._tensors[name] = laid_out.copy_(stored)
        return stored.detach()

    def _sparse(self, value: dict[str, Any]) -> Tensor:
        first, second, *rest = self.decoded(value["of"])
        layout = {str(known): known for known in _COMPONENTS}[value["layout"]]
        if not rest:
            is_coalesced = value["is_coalesced"]
            return torch.sparse_coo_tensor(
                first, second, value["shape"], is_coalesced=is_coalesced, check_invariants=True
            )
        (values,) = rest
        return torch.sparse_compressed_tensor(
            first, second, values, value["shape"], layout=layout, check_invariants=True
        )


def _of_its_class(of: dict[str, Any]) -> Any:
    """The tensor subclass; or its inner tensors, if the class is not imported."""
    kind = known_class(of[_SUBCLASS])
    like = torch.empty_strided(of["shape"], of["stride"], device="meta")
    return of if kind is None else put_together(kind, of["tensors"], of["context"], like)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return found


# -- files ----------------------------------------------------------------------------------------------------------


def read_pack(path: Path, file: IO[bytes], record: FileRecord) -> str | dict[str, Any]:
    """Verify and load an open file, reading it once.

    Returns:
        The state, with tensors on the CPU; or what is wrong with the file, as the rest of a sentence.

    Raises:
        CheckpointError: it has the right hash but is not a pack.
        OSError: it cannot be read.
    """
    digest, position, size = blake3(), 0, os.fstat(file.fileno()).st_size

    def next_bytes(count: int) -> Any:
        nonlocal position
        values = torch.empty(count, dtype=torch.uint8).numpy()
        for begin in range(0, count, PIECE_BYTES):  # each piece is hashed while it is in the cache
            piece = values[begin : begin + PIECE_BYTES]
            read_into(file, piece, position + begin)
            digest.update(piece.data)
        position += count
        return values

    try:
        state: dict[str, Any] = _read(next_bytes, size)
    except Exception as error:
        if problem := record.problem(path.name, hash_file(file)):
            return problem
        if isinstance(error, OSError):
            raise
        raise _no_pack(path, error) from error
    problem = record.problem(path.name, FileRecord.of(size, digest))
    return problem or state


def map_pack(path: Path) -> dict[str, Any]:
    """Map the state in a file, unverified; tensors are read from disk when they are used.

    Use it to look at a few tensors of a large file, not for training: optimizers keep the loaded tensors, and with them
    the disk space of a deleted file.

    Raises:
        CheckpointError: one line; it is not a pack.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise _no_pack(path, ValueError("it is empty"))
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    try:
        return unpacked(mapped, in_place=True)  # type: ignore[no-any-return]  # of a file it is a mapping
    except Exception as error:
        raise _no_pack(path, error) from error


def unpacked(room: memoryview, *, in_place: bool = False) -> Any:
    """Decode the state that was written into a buffer.

    Args:
        in_place: tensors refer to the buffer instead of a copy.

    Raises:
        Exception: of any type; the buffer holds no pack.
    """
    rest = room

    def next_bytes(count: int) -> Any:
        nonlocal rest
        if count > len(rest):
            raise ValueError("it is shorter than its header says")
        found, rest = rest[:count], rest[count:]
        return found if in_place else bytearray(found)

    return _read(next_bytes, len(room))


def _no_pack(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a file of a checkpoint ({one_line(error)}): it was not loaded and nothing in it was executed."
    )
