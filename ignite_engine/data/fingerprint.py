"""Whether map-style data is still the same, told from what it holds, without reading a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

_DEPTH = 6
_ELEMENTS = 1024
"""Elements of one row that are hashed at most."""


def fingerprint(dataset: Any) -> str | None:
    """A hash of the first, middle and last of what ``dataset`` holds: rows of tensors and arrays, texts, file names.

    No sample is read, as that may draw random numbers, count, or open a file that workers must open themselves. Looked
    at are a list, and the attributes of a dataset and of those inside it. A path counts by its last part, so that data
    may move. What a dataset reads by other means is not seen.

    Returns:
        None: it holds nothing of that kind.
    """
    digest, held = hashlib.sha256(), False
    for content in _held(dataset, 0):
        digest.update(content)
        held = True
    return digest.hexdigest()[:16] if held else None


def _held(value: Any, depth: int) -> Iterator[bytes]:
    """What tells a dataset, or an attribute of one."""
    if depth > _DEPTH:
        return
    if isinstance(value, Subset):
        yield from (*_held(value.dataset, depth + 1), *_some_rows(value.indices))
    elif isinstance(value, Tensor | np.ndarray):
        yield from _some_rows(value) if value.ndim else ()
    elif isinstance(value, list | tuple):
        # numbers in a list of an attribute may count what was read
        if value and (depth == 0 or not isinstance(value[0], int | float)):
            yield from _some_rows(value)
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from _held(element, depth + 1)
    elif isinstance(value, Dataset) or depth == 0:
        for _, attribute in sorted(getattr(value, "__dict__", {}).items()):
            yield from _held(attribute, depth + 1)


def _some_rows(rows: Sequence[Any] | Tensor | np.ndarray[Any, Any]) -> Iterator[bytes]:
    """The length, and the first, the middle and the last row."""
    yield str(len(rows)).encode()
    for at in sorted({0, len(rows) // 2, len(rows) - 1} if len(rows) else ()):
        yield from _content(rows[at], 0)


def _content(value: Any, depth: int) -> Iterator[bytes]:
    """What one row or sample is, as far as it is of a known type."""
    if depth > _DEPTH:
        return
    if isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta":
        row = value.detach().reshape(-1)[:_ELEMENTS].resolve_conj()
        row = torch.view_as_real(row) if row.is_complex() else row
        yield f"{tuple(value.shape)}".encode() + row.to("cpu", torch.float64).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        yield f"{value.shape}".encode() + np.asarray(value).reshape(-1)[:_ELEMENTS].tobytes()
    elif isinstance(value, str | PurePath):
        yield PurePath(value).name.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        yield value[:_ELEMENTS]
    elif value is None or isinstance(value, int | float | complex):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from (*_content(key, depth + 1), *_content(element, depth + 1))
    elif isinstance(value, list | tuple):
        for element in value[:_ELEMENTS]:
            yield from _content(element, depth + 1)
    elif isinstance(value, Dataset):  # the parts of a ConcatDataset
        yield from _held(value, depth + 1)
