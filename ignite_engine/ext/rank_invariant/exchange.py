"""Sums over ranks in the order of one tree: each rank finishes a chunk of it, and all get every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ignite_engine.ext.rank_invariant.gradient_buffers import Bucket, GradientBuffers, Sum
from ignite_engine.ext.rank_invariant.tree_sum import Node, TreeSum
from ignite_engine.ranks import agreement


def exchanged_on(device: torch.device) -> torch.device:
    """Where ranks exchange what is on ``device``: gloo sends from the host's memory only."""
    backend = dict(part.split(":") for part in dist.get_backend_config().split(",")).get(device.type)
    return torch.device("cpu") if backend in (None, "gloo") else device


def gradient_group(device: torch.device) -> dist.ProcessGroup | None:
    """The group that exchanges what is on ``device``, which :func:`exchanged_on` gave.

    On the CPU one of its own, so that no user's message mixes in.
    """
    return agreement.cpu_group("gradients") if device.type == "cpu" else dist.group.WORLD


class Exchange:
    """The sum of all ranks' subtrees, which ``buffers`` holds. It keeps its own memory.

    That is, in units of the parameters' size, one for the result, and one for each subtree of another rank divided by
    the number of ranks.
    """

    def __init__(self, buffers: GradientBuffers) -> None:
        self.buffers, self._result = buffers, buffers.new()
        self._buckets = [
            _BucketExchange(bucket, result) for bucket, result in zip(buffers.buckets, self._result.flats, strict=True)
        ]

    def sum(self, own: Sequence[Sum], nodes: Sequence[Sequence[Node]]) -> list[Tensor]:
        """The gradients of all parameters, valid until the next call; a collective.

        Args:
            own: this rank's subtrees.
            nodes: of every rank, by rank; together they are the leaves of the iteration from 0 on.
        """
        for number, bucket in enumerate(self._buckets):
            bucket.send([subtree.flats[number] for subtree in own], nodes)
        for bucket in self._buckets:
            bucket.finish_chunk(nodes)
        for bucket in self._buckets:
            bucket.finish()
        return self._result.views


class _BucketExchange:
    def __init__(self, bucket: Bucket, result: Tensor) -> None:
        device = exchanged_on(bucket.device)
        self._bucket, self._on_device = replace(bucket, device=device), result
        self._result = result if device == bucket.device else self._bucket.flat(agreement.world_size())
        self._rank, self._ranks = agreement.rank(), agreement.world_size()
        self._group = gradient_group(device)
        self._own: Sequence[Tensor] = ()
        self._received: list[list[Tensor]] = [[] for _ in range(self._ranks)]
        """This rank's chunk of the others' subtrees, by rank."""
        self._pending: list[dist.Work] = []

    def _chunk(self, flat: Tensor, rank: int) -> Tensor:
        return flat[rank * self._bucket.chunk : (rank + 1) * self._bucket.chunk]

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank != self._rank]

    def send(self, own: Sequence[Tensor], nodes: Sequence[Sequence[Node]]) -> None:
        """Give every other rank its chunk of this rank's subtrees."""
        self._own, operations = [flat.to(self._bucket.device) for flat in own], []
        for peer in self._peers():
            received = self._received[peer]
            received += [self._bucket.flat(1) for _ in range(len(nodes[peer]) - len(received))]
            operations += [dist.P2POp(dist.isend, self._chunk(flat, peer), peer, self._group) for flat in self._own]
            operations += [dist.P2POp(dist.irecv, flat, peer, self._group) for flat in received[: len(nodes[peer])]]
        self._pending = dist.batch_isend_irecv(operations) if operations else []

    def finish_chunk(self, nodes: Sequence[Sequence[Node]]) -> None:
        """Sum this rank's chunk up, and give it to every other rank."""
        self.wait()
        tree: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for rank in range(self._ranks):
            values = self._received[rank] if rank != self._rank else [self._chunk(flat, rank) for flat in self._own]
            for node, value in zip(nodes[rank], values, strict=False):
                tree.push(node, value)
        finished = self._chunk(self._result, self._rank)
        finished.copy_(tree.total())
        operations = []
        for peer in self._peers():
            operations.append(dist.P2POp(dist.isend, finished, peer, self._group))
            operations.append(dist.P2POp(dist.irecv, self._chunk(self._result, peer), peer, self._group))
        self._pending = dist.batch_isend_irecv(operations)

    def finish(self) -> None:
        """Every chunk is where the parameters are."""
        self.wait()
        if self._result is not self._on_device:
            self._on_device.copy_(self._result)

    def wait(self) -> None:
        """Until what was sent last has gone, and what was to come is here."""
        for work in self._pending:
            work.wait()
        self._pending = []
