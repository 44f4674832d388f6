"""Whether map-style data is still the same, told from what it holds, without reading a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

_DEPTH = 6
_BUDGET = 1 << 22
"""Bytes that are hashed at most, about: of more, blocks that are spread evenly over all of it."""
_BLOCK = 1 << 12
_ROWS = 256
"""Elements of a list that are looked at, spread evenly over it."""


def fingerprint(dataset: Any) -> str | None:
    """A hash of what ``dataset`` holds: types, shapes and values of tensors and arrays, texts, file names.

    Small data is hashed whole. Of large data a sample is, spread evenly over all of it: a change is seen where it is
    larger than the gaps. No sample is read by ``__getitem__``, as that may draw random numbers, count, or open a file
    that workers must open themselves. Looked at are a list, and the attributes of a dataset and of those inside it. A
    path counts by its last part, so that data may move. What a dataset reads by other means is not seen.

    Returns:
        None: it holds nothing of that kind.
    """
    digest, held = hashlib.sha256(), False
    for content in _held(dataset, 0, _BUDGET):
        digest.update(content)
        held = True
    return digest.hexdigest()[:16] if held else None


def _held(value: Any, depth: int, budget: int) -> Iterator[bytes]:
    """What tells a dataset, or an attribute of one."""
    if depth > _DEPTH:
        return
    if isinstance(value, Subset):
        yield from (*_held(value.dataset, depth + 1, budget), *_content(value.indices, depth, budget))
    elif isinstance(value, Tensor | np.ndarray):
        yield from _content(value, depth, budget) if value.ndim else ()
    elif isinstance(value, list | tuple):
        # numbers in a list of an attribute may count what was read
        if value and (depth == 0 or not isinstance(value[0], int | float)):
            yield from _content(value, depth, budget)
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from _held(element, depth + 1, budget // len(value))
    elif isinstance(value, Dataset) or depth == 0:
        for _, attribute in sorted(getattr(value, "__dict__", {}).items()):
            yield from _held(attribute, depth + 1, budget)


def _content(value: Any, depth: int, budget: int) -> Iterator[bytes]:
    """What a value is, as far as it is of a known type."""
    if depth > _DEPTH:
        return
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type != "meta":
            yield f"{value.dtype} {tuple(value.shape)}".encode()
            yield from _values(value.detach(), value.numel(), value.element_size(), value.is_contiguous(), budget)
    elif isinstance(value, np.ndarray | np.generic):
        if not value.dtype.hasobject:
            yield f"{value.dtype} {value.shape}".encode()
            yield from _values(np.asarray(value), value.size, value.itemsize, value.flags.c_contiguous, budget)
    elif isinstance(value, str | PurePath):
        yield PurePath(value).name.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        yield from _content(np.frombuffer(value, np.uint8), depth, budget)
    elif value is None or isinstance(value, int | float | complex):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key, element in value.items():
            share = budget // len(value)
            yield from (*_content(key, depth + 1, share), *_content(element, depth + 1, share))
    elif isinstance(value, list | tuple | range):
        yield str(len(value)).encode()
        rows = _spread(len(value), max(2, min(_ROWS, budget // 64)))  # fewer of what is nested
        for row in rows:
            yield from _content(value[row], depth + 1, budget // len(rows))
    elif isinstance(value, Dataset):  # the parts of a ConcatDataset
        yield from _held(value, depth + 1, budget)


def _spread(length: int, count: int) -> list[int]:
    """At most ``count`` of the numbers below ``length``, with the first and the last, in even steps."""
    return list(range(length)) if length <= count else [at * (length - 1) // (count - 1) for at in range(count)]


def _values(values: Any, size: int, width: int, contiguous: bool, budget: int) -> Iterator[bytes]:
    """All bytes of a tensor or array, or some that are spread evenly; nothing else is read of a file that is mapped."""
    if size * width <= max(budget, _BLOCK):
        yield _bytes_of(values)
    elif contiguous:
        flat, block = values.reshape(-1), max(1, _BLOCK // width)
        for begin in _spread(size - block + 1, max(3, budget // 4 // _BLOCK)):
            yield _bytes_of(flat[begin : begin + block])
    else:
        for row in _spread(len(values), _ROWS):
            yield _bytes_of(values[row].reshape(-1)[:_BLOCK])


def _bytes_of(values: Any) -> bytes:
    if isinstance(values, Tensor):
        values = values.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    content: bytes = values.tobytes()
    return content
