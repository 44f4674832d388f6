"""Digests of tensors and states, for comparing them without keeping them: SHA-256, and a fast 64-bit hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ignite_engine.checkpoint.nested import dotted, is_made_of_tensors, taken_apart, walk

HASH = "sums64-1"
"""Identifies the algorithm of :func:`hashes`; change it together with the algorithm."""
_WIDTHS = (61, 251, 1021, 4093)
"""Candidate widths of a row, in words. Primes, so that no column of a matrix is a column of the table."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
Pieces = dict[str, str]


def digests(state: Any) -> Pieces:
    """The digest of each leaf of a nested state, by path: SHA-256 for tensors and arrays, the value for a scalar.

    Paths are keys joined by dots; ``""`` for a state that is itself a leaf. A list of scalars is one leaf. A sharded
    tensor is digested by this rank's shard, an object of another type by the name of its type.
    """
    return {dotted(path): _digest(value) for path, value in walk(state, whole=_is_piece)}


def _is_piece(value: Any) -> bool:
    if isinstance(value, set | frozenset):
        return True
    return isinstance(value, list | tuple) and all(isinstance(item, _SCALARS) for item in value)


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
    """SHA-256 over type, shape and bytes; NaNs with different bits differ, as do 0.0 and -0.0."""
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
    """The bytes of a dense tensor on the CPU in row-major order, shape ``(n,)``; copied only if necessary.

    Of a tensor that is made of others, those of each of them.
    """
    if is_made_of_tensors(tensor):
        return torch.cat([tensor_bytes(part) for part in taken_apart(tensor)[0].values()])
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _sha256(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def hashed(tensor: Tensor) -> Tensor:
    """The hash of one tensor, see :func:`hashes`; shape ``()``."""
    return hashes([tensor])[0]


@torch.no_grad()
def hashes(tensors: Sequence[Tensor]) -> Tensor:
    """64 bits of the values and places of each strided tensor, shape ``(len(tensors),)``, on the device of the first.

    The bytes form a table of 8-byte words, whose rows and columns are summed modulo 2**64: no word is multiplied.
    A change of up to three words, such as one bit or an exchange of two elements, changes a sum; one of more words does
    unless it cancels itself in each row and each column. The sums are mixed, multiplied by factors of their places and
    added: other sums give another hash but for a chance of 2**-64. A device is read without a host sync.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    sums = [_sums(_words(tensor)) for tensor in tensors]
    device = tensors[0].device
    mixed = torch.cat([part.to(device) for parts in sums for part in parts])
    mixed = mixed ^ (mixed >> 29 & 2**35 - 1)  # a sign counts for low bits; by 32 both signs of a word cancel out
    counts = torch.tensor([sum(map(len, parts)) for parts in sums])
    owners = torch.arange(len(counts)).repeat_interleave(counts)
    places = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    mixed *= _factors(places.to(device))
    return torch.zeros(len(counts), dtype=torch.int64, device=device).index_add_(0, owners.to(device), mixed)


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor, eight bytes at a time, shape ``(n,)``; copied only if they are not aligned."""
    if is_made_of_tensors(tensor):
        return torch.cat([_words(part) for part in taken_apart(tensor)[0].values()])
    values = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    if values.is_complex():
        values = torch.view_as_real(values).view(-1)
    if values.numel() * values.element_size() % 8:
        content = values.view(torch.uint8)
        values = torch.cat([content, content.new_zeros(-len(content) % 8)])
    elif values.storage_offset() * values.element_size() % 8:
        values = values.clone()
    return values.view(torch.int64)


def _sums(words: Tensor) -> list[Tensor]:
    """Sums of the rows and columns of a table of words, and the remaining words; few words are returned as they are."""
    width = next((width for width in _WIDTHS if width**2 >= len(words)), _WIDTHS[-1])
    rows = len(words) // width
    if rows < 2:
        return [words]
    table = words[: rows * width].view(rows, width)
    return [table.sum(1), table.sum(0), words[rows * width :]]


def _factors(places: Tensor) -> Tensor:
    """An odd factor for each position: the SplitMix64 finaliser without its last shift."""
    mixed = (places + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # 0xBF58476D1CE4E5B9, 0x94D049BB...
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed | 1
