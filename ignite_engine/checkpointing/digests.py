"""Digests of tensors and states, to compare two of them without keeping them: SHA-256, and 64 bits that are fast."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ignite_engine.checkpointing.nested import dotted, walk

_COLUMNS, _ROWS = 4096, 4096
"""Words in a row, and rows that are multiplied at a time on a GPU."""
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


def hashed(tensor: Tensor) -> Tensor:
    """64 bits of a strided tensor's values and their places, shape ``()``, on its device; no host sync.

    A linear function of the bits, eight bytes at a time, with odd factors that depend on the place, modulo 2**64. One
    bit, element or word that changes always changes it; so does, unlike ``torch.hash_tensor``'s, an exchange of two.
    """
    values = tensor.detach().contiguous().reshape(-1)
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    if values.storage_offset() * values.element_size() % 8:  # a part of another tensor: not to be read as words
        values = values.clone()
    content = values.view(torch.int8)
    whole = len(content) // 8
    words, rest = content[: whole * 8].view(torch.int64), content[whole * 8 :].long()
    rows = whole // _COLUMNS
    table, tail = words[: rows * _COLUMNS].view(rows, _COLUMNS), torch.cat([words[rows * _COLUMNS :], rest])
    columns = _factors(_COLUMNS + 8, 0, words.device)
    sums = _products(table, columns[:_COLUMNS])
    return (sums * _factors(rows, 2**32, words.device)).sum() + (tail * columns[: len(tail)]).sum()


def _products(table: Tensor, factors: Tensor) -> Tensor:
    """The product of a matrix of integers and a vector."""
    if table.device.type == "cpu":
        return torch.mv(table, factors)  # without a second matrix; torch has none for integers on a GPU
    return torch.cat([(rows * factors).sum(1) for rows in table.split(_ROWS)]) if len(table) else table.sum(1)


def _factors(count: int, start: int, device: torch.device) -> Tensor:
    """Odd factors of the places from ``start`` on, by the SplitMix64 finaliser without its last shift."""
    mixed = torch.arange(start + 1, start + count + 1, device=device) * -7046029254386353131  # 0x9E3779B97F4A7C15
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # 0xBF58476D1CE4E5B9, 0x94D049BB...
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed | 1
