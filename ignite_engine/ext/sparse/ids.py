"""Maps raw ids, such as those of users and pages, to rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor


def hash_ids(ids: Tensor, buckets: int, salt: int | Tensor = 0) -> Tensor:
    """A number from 0 to ``buckets - 1`` for each id, the same on every machine; neighbours are spread.

    Args:
        ids: whole numbers, of any shape; the type does not matter.
        salt: another one gives other numbers; a tensor is broadcast, for instance one for each column of ``ids``.

    Raises:
        TypeError, ValueError: ids are not whole numbers, or there is no bucket.

    Source: the SplitMix64 finaliser, Steele, Lea and Flood 2014, as ``rng.mix(salt, id)``.
    """
    if not isinstance(buckets, int) or buckets < 1:
        raise ValueError(f"buckets must be a whole number of at least 1, got {buckets}.")
    salts = torch.as_tensor(salt, dtype=torch.int64, device=ids.device)
    return _mixed(_mixed(salts) + _whole(ids)).remainder(buckets)


def _whole(ids: Tensor) -> Tensor:
    """The ids as int64, so that their type does not change the hash.

    Raises:
        TypeError: they are not whole numbers.
    """
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"ids must be whole numbers, got {ids.dtype}: give ids.long(), if that is what they are.")
    return ids.long()


def _mixed(values: Tensor) -> Tensor:
    values = values - 0x61C8864680B583EB  # signed, as int64 arithmetic wraps around
    values = (values ^ _shifted(values, 30)) * -0x40A7B892E31B1A47
    values = (values ^ _shifted(values, 27)) * -0x6B2FB644ECCEEE15
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """A logical shift to the right."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
