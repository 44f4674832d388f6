"""SHA-256 of every piece of a nested state, so that two states can be compared piece by piece without keeping them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ignite_engine.checkpointing.nested import dotted, walk

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
Pieces = dict[str, str]


def digests(state: Any) -> Pieces:
    """Each leaf of a nested state by its path: a SHA-256 for tensors and arrays, the value itself for a scalar.

    Paths are keys joined by dots; ``""`` for a state that is one piece. A list of scalars is one piece. Of a tensor
    that is sharded over ranks it is this rank's shard. An object of any other type counts by the name of its type.
    """
    return {dotted(path): _digest(value) for path, value in walk(state, whole=_is_piece)}


def _is_piece(value: Any) -> bool:
    if isinstance(value, set | frozenset):
        return True
    return isinstance(value, list | tuple) and all(isinstance(each, _SCALARS) for each in value)


def _digest(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return tensor_sha256(value)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if not isinstance(value, (*_SCALARS, list, tuple)):
        return f"a {type(value).__name__}"
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 40 else _sha256(text.encode())


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
    return _sha256(head.encode(), *(tensor_bytes(part).numpy() for part in parts))


def tensor_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor on the CPU in row-major order, shape ``(n,)``; no copy where they already are so."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _sha256(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"
