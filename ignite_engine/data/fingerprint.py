"""A fingerprint of map-style data from what the dataset holds, without reading a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ignite_engine.data.seeding import SeededDataset

_DEPTH = 6
_BUDGET = 1 << 22
"""About the maximum number of bytes that are hashed; larger data is sampled in evenly spread blocks."""
_BLOCK = 1 << 12
_ROWS = 256
"""The number of elements of a list that are hashed, spread evenly over it."""


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
    for content in _contents(dataset.dataset if isinstance(dataset, SeededDataset) else dataset, 0, _BUDGET):
        digest.update(content)
        held = True
    return digest.hexdigest()[:16] if held else None


def _contents(value: Any, depth: int, budget: int) -> Iterator[bytes]:
    """The parts of a value that are of a known type, for hashing."""
    parts: Sequence[Any] = ()
    if isinstance(value, Tensor | np.ndarray | np.generic):
        strided = not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_meta)
        if strided and not getattr(value.dtype, "hasobject", False):
            yield f"{value.dtype} {tuple(value.shape)}".encode()
            yield _bytes_of(value, budget)
    elif isinstance(value, str | PurePath):
        yield PurePath(value).name.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        parts = [np.frombuffer(value, np.uint8)]
    elif value is None or isinstance(value, int | float | complex):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        parts = [*chain.from_iterable(value.items())]
    elif isinstance(value, list | tuple | range):
        yield str(len(value)).encode()
        parts = [value[row] for row in _spread(len(value), max(2, min(_ROWS, budget // 64)))]  # fewer of what is nested
    elif isinstance(value, Subset):
        parts = [value.dataset, value.indices]
    elif isinstance(value, Dataset) or depth == 0:
        parts = _samples_in(getattr(value, "__dict__", {}))
    if depth < _DEPTH:
        for part in parts:
            yield from _contents(part, depth + 1, budget // len(parts))


def _samples_in(attributes: Mapping[Any, Any]) -> list[Any]:
    """The attributes that hold samples; not settings, nor numbers that may count reads."""
    found = []
    for value in attributes.values():
        if isinstance(value, Mapping):
            found += _samples_in(value)
        elif isinstance(value, list | tuple):
            found += [value] if value and not isinstance(value[0], int | float) else []
        elif isinstance(value, Dataset) or (isinstance(value, Tensor | np.ndarray) and value.ndim):
            found.append(value)
    return found


def _spread(length: int, count: int) -> list[int]:
    """At most ``count`` evenly spread numbers below ``length``, with the first and the last."""
    return list(range(length)) if length <= count else [at * (length - 1) // (count - 1) for at in range(count)]


def _bytes_of(values: Any, budget: int) -> bytes:
    """All bytes of a tensor or array, or some that are spread evenly; nothing else is read of a file that is mapped."""
    size, width = int(np.prod(values.shape)), values.itemsize
    if size * width > max(budget, _BLOCK):
        block = max(1, _BLOCK // width)
        begins = _spread(size - block + 1, max(3, budget // 4 // _BLOCK))
        places = np.add.outer(begins, np.arange(block)).ravel()
        values = values.take(torch.from_numpy(places)) if isinstance(values, Tensor) else values.flat[places]
    if isinstance(values, Tensor):
        values = values.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    content: bytes = values.tobytes()
    return content
