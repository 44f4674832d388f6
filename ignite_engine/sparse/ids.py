"""Raw ids, such as those of users and pages, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_EMPTY = torch.empty(0, dtype=torch.int64)


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
    return _mixed(_mixed(salts) + whole_ids(ids)).remainder(buckets)


def whole_ids(ids: Tensor) -> Tensor:
    """Ids as int64: other types wrap around elsewhere, which gives other ids.

    Raises:
        TypeError: they are not whole numbers.
    """
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"ids must be whole numbers, got {ids.dtype}: give ids.long(), if that is what they are.")
    return ids.long()


def _mixed(values: Tensor) -> Tensor:
    values = values - 0x61C8864680B583EB  # as signed numbers, which wrap around
    values = (values ^ _shifted(values, 30)) * -0x40A7B892E31B1A47
    values = (values ^ _shifted(values, 27)) * -0x6B2FB644ECCEEE15
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """To the right, without copies of the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


class IdRows(nn.Module):
    """The row of each id in a table of ``rows`` rows: its own if it has been given one, else one that it shares.

    The first ``shared`` rows are for ids without a row of their own, by their hash; the others are given out by
    ``handlers.IdAdmission``. With ``shared=1`` and ``nn.Embedding(..., padding_idx=0)`` such ids have a row of zeros.

    The map is in the model's state (as extra state, so DDP does not send it with each forward): a model that is loaded
    elsewhere finds the same rows.

    Raises:
        ValueError: there is no row to share, or none to give out.
    """

    def __init__(self, rows: int, shared: int, *, salt: int = 0) -> None:
        super().__init__()
        if not 1 <= shared < rows:
            raise ValueError(f"shared must be from 1 to rows - 1, which is {rows - 1}, got {shared}.")
        self.rows, self.shared, self.salt = rows, shared, salt
        self.ids = self.own_rows = _EMPTY
        """Ids that have a row of their own, in ascending order; and the rows."""

    def forward(self, ids: Tensor) -> Tensor:
        """Rows, int64, of the shape of ``ids``, whole numbers of any type."""
        ids = whole_ids(ids)
        rows = hash_ids(ids, self.shared, self.salt)
        if not len(self.ids):
            return rows
        place, has_own = self.find(ids)
        return torch.where(has_own, self.own_rows[place], rows)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The index of each id in :attr:`ids`, and whether it is there; otherwise the index means nothing."""
        if not len(self.ids):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        place = torch.searchsorted(self.ids, ids.contiguous()).clamp_(max=len(self.ids) - 1)
        return place, self.ids[place] == ids

    def free_rows(self) -> Tensor:
        """Rows that can be given out, in ascending order."""
        is_free = torch.ones(self.rows, dtype=torch.bool, device=self.own_rows.device)
        is_free[: self.shared] = False
        is_free[self.own_rows] = False
        return is_free.nonzero().squeeze(1)

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """The ids that have rows of their own from now on, in ascending order, and these rows."""
        device = self.ids.device
        self.ids, self.own_rows = ids.to(device), rows.to(device)

    def get_extra_state(self) -> Tensor:
        """Ids, and their rows or -1; shape ``(2, rows - shared)``, however many rows are given out."""
        state = torch.full((2, self.rows - self.shared), -1, dtype=torch.int64)
        state[0, : len(self.ids)], state[1, : len(self.ids)] = self.ids, self.own_rows
        return state

    def set_extra_state(self, state: Tensor) -> None:
        if state.shape != (2, self.rows - self.shared):
            raise RuntimeError(
                f"The saved IdRows gives out {state.shape[1]} rows and this one {self.rows - self.shared}: build it "
                "with the same rows and shared."
            )
        ids, rows = state[:, state[1] >= 0]  # a copy
        self.assign(ids, rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.ids, self.own_rows = fn(self.ids), fn(self.own_rows)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
