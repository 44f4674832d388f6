"""Gradients summed over ranks in the order of one tree: each rank finishes a chunk of it, and all get every chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ignite_engine.ranks import agreement
from ignite_engine.step.tree_sum import Gradients, Node, TreeSum

_BUCKET_BYTES = 8 * 2**20
_ALIGNED = 16  # elements: each gradient begins at the same alignment as one of its own memory

ABSENT = -0.0
"""Adds nothing to any number; +0.0 would change the sign of -0.0."""


def gradient_group(device: torch.device) -> dist.ProcessGroup | None:
    """The group that exchanges what is on ``device``; on the CPU one of its own, so that no user's message mixes in."""
    return agreement.cpu_group("gradients") if device.type == "cpu" else dist.group.WORLD


class Exchange:
    """The sum of all ranks' subtrees, for parameters of any dtypes on one device. Its buffers are kept.

    They take, in units of the parameters' size, one for each subtree of this rank, one for the subtrees of the others
    divided by the number of ranks, and one for the result.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.rank, self.ranks = agreement.rank(), agreement.world_size()
        self.group = gradient_group(parameters[0].device)
        self._buckets = [_Bucket(self, places) for places in _bucket_places(parameters)]

    def is_for(self, parameters: Sequence[Tensor]) -> bool:
        """Whether it was made for these parameters."""
        return list(map(id, parameters)) == list(map(id, self.parameters))

    def sum(self, own: Sequence[Gradients], nodes: Sequence[Sequence[Node]]) -> list[Tensor]:
        """The gradients of all parameters, valid until the next call; a collective.

        Args:
            own: this rank's subtrees.
            nodes: of every rank, by rank; together they are the leaves of the iteration from 0 on.
        """
        for bucket in self._buckets:
            bucket.send(own, nodes)
        for bucket in self._buckets:
            bucket.finish_chunk(nodes)
        result: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        for bucket in self._buckets:
            for place, gradient in zip(bucket.places, bucket.gathered(), strict=True):
                result[place] = gradient
        return result


def _bucket_places(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Places of parameters of one dtype and device, together no larger than a bucket if they are several."""
    found: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for place, parameter in enumerate(parameters):
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        places, filled = open_buckets.get(kind, ([], 0))
        if not places or filled + size > _BUCKET_BYTES:
            places, filled = [], 0
            found.append(places)
        places.append(place)
        open_buckets[kind] = places, filled + size
    return found


class _Bucket:
    """Some of the parameters, in flat buffers that are cut into one chunk per rank."""

    def __init__(self, exchange: Exchange, places: list[int]) -> None:
        self.exchange, self.places = exchange, places
        self._parameters = [exchange.parameters[place] for place in places]
        self._offsets: list[int] = []
        size = 0
        for parameter in self._parameters:
            self._offsets.append(size)
            size += -(-parameter.numel() // _ALIGNED) * _ALIGNED
        self.chunk = -(-size // (exchange.ranks * _ALIGNED)) * _ALIGNED
        self._result = self._flat(exchange.ranks)
        self._result_views = self._views(self._result)
        self._own: list[tuple[Tensor, list[Tensor]]] = []
        """For each subtree of this rank its buffer, and the gradients as views of it."""
        self._received: dict[int, list[Tensor]] = {}
        """This rank's chunk of the others' subtrees, by rank."""
        self._pending: list[dist.Work] = []

    def _flat(self, chunks: int) -> Tensor:
        first = self._parameters[0]
        return torch.zeros(chunks * self.chunk, dtype=first.dtype, device=first.device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [_like(each, flat, offset) for each, offset in zip(self._parameters, self._offsets, strict=True)]

    def send(self, own: Sequence[Gradients], nodes: Sequence[Sequence[Node]]) -> None:
        """Give every other rank its chunk of this rank's subtrees."""
        exchange = self.exchange
        while len(self._own) < len(own):
            flat = self._flat(exchange.ranks)
            self._own.append((flat, self._views(flat)))
        for gradients, (_, views) in zip(own, self._own, strict=False):
            present = [
                (view, gradient)
                for view, place in zip(views, self.places, strict=True)
                if (gradient := gradients[place]) is not None
            ]
            if len(present) < len(views):
                for view, place in zip(views, self.places, strict=True):
                    if gradients[place] is None:
                        view.fill_(ABSENT)
            if present:
                torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        operations = []
        for rank in range(exchange.ranks):
            if rank == exchange.rank:
                continue
            operations += [
                dist.P2POp(dist.isend, flat[rank * self.chunk : (rank + 1) * self.chunk], rank, exchange.group)
                for flat, _ in self._own[: len(own)]
            ]
            received = self._received.setdefault(rank, [])
            received += [self._flat(1) for _ in range(len(nodes[rank]) - len(received))]
            operations += [
                dist.P2POp(dist.irecv, chunk, rank, exchange.group) for chunk in received[: len(nodes[rank])]
            ]
        self._pending = dist.batch_isend_irecv(operations) if operations else []

    def finish_chunk(self, nodes: Sequence[Sequence[Node]]) -> None:
        """Sum this rank's chunk up, and give it to every other rank."""
        exchange = self.exchange
        own = slice(exchange.rank * self.chunk, (exchange.rank + 1) * self.chunk)
        for work in self._pending:
            work.wait()
        tree: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for rank in range(exchange.ranks):
            values = [flat[own] for flat, _ in self._own] if rank == exchange.rank else self._received[rank]
            for node, value in zip(nodes[rank], values, strict=False):
                tree.push(node, value)
        self._result[own].copy_(tree.total())
        operations = []
        for rank in range(exchange.ranks):
            if rank != exchange.rank:
                theirs = self._result[rank * self.chunk : (rank + 1) * self.chunk]
                operations.append(dist.P2POp(dist.isend, self._result[own], rank, exchange.group))
                operations.append(dist.P2POp(dist.irecv, theirs, rank, exchange.group))
        self._pending = dist.batch_isend_irecv(operations)

    def gathered(self) -> list[Tensor]:
        """The sums, in the order of :attr:`places`."""
        for work in self._pending:
            work.wait()
        self._pending = []
        return self._result_views


def _like(parameter: Tensor, flat: Tensor, offset: int) -> Tensor:
    """A view of ``flat`` with the strides that autograd gives a gradient of ``parameter``."""
    stride, expected = parameter.stride(), 1
    dense = True
    for size, step in sorted(zip(parameter.shape, stride, strict=True), key=lambda each: each[1]):
        dense = dense and (size == 1 or step == expected)
        expected *= size
    if not dense:
        return flat[offset : offset + parameter.numel()].view(parameter.shape)
    return flat.as_strided(parameter.shape, stride, offset)
