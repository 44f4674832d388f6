"""Flat memory for sums of gradients, kept from update to update: fresh memory costs more than the additions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ABSENT = -0.0
"""Adds nothing to any number; +0.0 would change the sign of -0.0."""

_BUCKET_BYTES = 8 * 2**20
_ALIGNED = 16  # elements: each gradient begins at the same alignment as one in memory of its own


@dataclass
class Bucket:
    """Some of the parameters, of one dtype and device, in flat memory of one chunk for each rank."""

    places: list[int]
    offsets: list[int]
    chunk: int
    dtype: torch.dtype
    device: torch.device

    def flat(self, chunks: int) -> Tensor:
        return torch.zeros(chunks * self.chunk, dtype=self.dtype, device=self.device)


@dataclass
class Sum:
    """A sum of gradients: for each bucket its memory, for each parameter a view of it."""

    flats: list[Tensor]
    views: list[Tensor]
    present: bytearray
    """Whether the parameter has had a gradient; what its view holds otherwise means nothing."""

    def fill_absent(self) -> None:
        """Let what has no gradient add nothing."""
        if not any(self.present):
            for flat in self.flats:
                flat.fill_(ABSENT)
        elif not all(self.present):
            for view, present in zip(self.views, self.present, strict=True):
                if not present:
                    view.fill_(ABSENT)


class GradientBuffers:
    """Memory for sums over ``parameters``, in buckets that are cut into one chunk for each of ``ranks``."""

    def __init__(self, parameters: Sequence[Tensor], ranks: int) -> None:
        self.parameters, self.ranks = list(parameters), ranks
        self.buckets = _buckets(self.parameters, ranks)
        self._all: list[Sum] = []
        self._free: list[Sum] = []

    def reset(self) -> None:
        """Every sum is free again."""
        self._free = list(self._all)

    def take(self) -> Sum:
        """A sum without any gradient."""
        if not self._free:
            self._all.append(self.new())
            self._free.append(self._all[-1])
        taken = self._free.pop()
        taken.present[:] = bytes(len(taken.present))
        return taken

    def give_back(self, taken: Sum) -> None:
        """It is not used any more in this update."""
        self._free.append(taken)

    def new(self) -> Sum:
        """A sum that is not one of those that are taken."""
        flats = [bucket.flat(self.ranks) for bucket in self.buckets]
        views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        for bucket, flat in zip(self.buckets, flats, strict=True):
            for place, offset in zip(bucket.places, bucket.offsets, strict=True):
                views[place] = _like(self.parameters[place], flat, offset)
        return Sum(flats, views, bytearray(len(views)))


def _buckets(parameters: Sequence[Tensor], ranks: int) -> list[Bucket]:
    found: list[Bucket] = []
    still_open: dict[tuple[torch.dtype, torch.device], tuple[Bucket, int]] = {}
    for place, parameter in enumerate(parameters):
        kind = parameter.dtype, parameter.device
        bucket, filled = still_open.get(kind, (None, 0))
        if bucket is None or (filled + parameter.numel()) * parameter.element_size() > _BUCKET_BYTES:
            bucket, filled = Bucket([], [], 0, *kind), 0
            found.append(bucket)
        bucket.places.append(place)
        bucket.offsets.append(filled)
        filled += -(-parameter.numel() // _ALIGNED) * _ALIGNED
        bucket.chunk = -(-filled // (ranks * _ALIGNED)) * _ALIGNED
        still_open[kind] = bucket, filled
    return found


def _like(parameter: Tensor, flat: Tensor, offset: int) -> Tensor:
    """A view of ``flat`` with the strides that autograd gives a gradient of ``parameter``."""
    stride, expected = parameter.stride(), 1
    dense = True
    for size, step in sorted(zip(parameter.shape, stride, strict=True), key=lambda dimension: dimension[1]):
        dense = dense and (size == 1 or step == expected)
        expected *= size
    if not dense:
        return flat[offset : offset + parameter.numel()].view(parameter.shape)
    return flat.as_strided(parameter.shape, stride, offset)
