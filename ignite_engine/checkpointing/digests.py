"""SHA-256 of every piece of a nested state, so that two states can be compared piece by piece without keeping them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
Pieces = dict[str, str]


def digests(state: Any) -> Pieces:
    """Each leaf of a nested state by its path: a SHA-256 for tensors and arrays, the value itself for a scalar.

    Paths are keys joined by dots, those of one piece alone ``""``. A list of scalars is one piece. Of a tensor that is
    sharded over ranks this rank's part counts. An object of another kind counts by the name of its type.
    """
    return dict(_leaves(state, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and not all(isinstance(each, _SCALARS) for each in value):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}.{index}" if path else str(index))
    elif isinstance(value, Tensor | np.ndarray):
        yield path, tensor_sha256(value)
    elif isinstance(value, list | tuple | set | frozenset):
        shown = repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value))
        yield path, shown if len(shown) <= 40 else _sha256(shown.encode())
    elif isinstance(value, _SCALARS):
        shown = repr(value)
        yield path, shown if len(shown) <= 40 else _sha256(shown.encode())
    else:
        yield path, f"a {type(value).__name__}"


def tensor_sha256(value: Tensor | np.ndarray[Any, Any]) -> str:
    """SHA-256 over type, shape and bytes; NaNs of other bits differ, as do 0.0 and -0.0."""
    if isinstance(value, np.ndarray):
        head = f"{value.dtype} {value.shape}"
        data = value.tobytes() if value.dtype != object else repr(value.tolist()).encode()
        return _sha256(head.encode(), data)
    tensor: Tensor = value.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    parts = [tensor]
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        parts = [tensor.indices(), tensor.values()]
    elif tensor.layout != torch.strided:
        parts = [tensor.to_dense()]
    head = f"{tensor.dtype} {tuple(tensor.shape)}"
    return _sha256(head.encode(), *(_bytes_of(part) for part in parts))


def _bytes_of(tensor: Tensor) -> Any:
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy()


def _sha256(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"
