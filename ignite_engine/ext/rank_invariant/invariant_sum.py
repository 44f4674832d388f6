"""Sums over the micro-batches of all ranks in the order of one tree, whichever rank computed which of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ignite_engine.ranks import agreement
from ignite_engine.ranks.tree_sum import TreeSum, nodes_of

ABSENT = -0.0
"""Adds nothing to any number; +0.0 would change the sign of -0.0."""
Spare = defaultdict[Any, list[Tensor]]
"""Memory for the sums of later micro-batches and updates, by shape, strides and dtype."""


_BUCKET_BYTES = 1 << 22
"""The sums are exchanged in buckets of at least this size."""


class InvariantSum:
    """The sums of several tensors over all micro-batches, each in the order of the tree.

    A value is added as soon as it is known, while it is in the cache; at most one tensor is kept for each level of the
    tree. Ranks exchange a bucket of sums as soon as its last values are there, while the others are computed.

    Args:
        leaves: the micro-batches of each rank, by rank; together they are those of the iteration, from 0 on.
        last: the last micro-batch on this rank that adds values, if any.
        like: a tensor of the shape, strides, dtype and device of each sum; values come in about the reverse order.
        spare: is used and filled. On the CPU new memory costs more than the additions do, as the system clears each
            page when it is touched first; accelerators keep freed memory by themselves.
    """

    def __init__(self, leaves: Sequence[range], last: Sequence[int], like: Sequence[Tensor], spare: Spare) -> None:
        self._own, self._last = leaves[agreement.rank()], last
        self._nodes = [nodes_of(of_rank) for of_rank in leaves]
        self._like, self._spare = like, spare
        self._trees = [TreeSum[Tensor | None](self._added, self._own.start) for _ in like]
        self._given: Tensor | None = None
        self._buckets = _buckets(like) if len(leaves) > 1 else []
        self._bucket_of = {at: number for number, bucket in enumerate(self._buckets) for at in bucket}
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent: list[tuple[dist.Work, Tensor, tuple[Tensor, Tensor]]] = []
        """Of each bucket whose exchange has begun: what is sent, and the memory that is in use."""

    def add(self, at: int, leaf: int, value: Tensor) -> None:
        """Add ``value``, which may be written to, of the micro-batch ``leaf`` to the sum number ``at``.

        Raises:
            ValueError: the micro-batch has added a value already.
        """
        tree = self._trees[at]
        if tree.end > leaf:
            raise ValueError(
                f"rank_invariant cannot sum a gradient of shape {tuple(value.shape)} that comes in several parts in "
                "one backward: use torch.utils.checkpoint with use_reentrant=False."
            )
        self._skip_to(leaf, tree)
        is_left = leaf % 2 == 0 or not tree.nodes or tree.nodes[-1][1] is None  # there is nothing to add it to
        if is_left and (free := self._spare[_kind_of(value)]):
            value = free.pop().copy_(value)
        self._given = value
        tree.push((leaf, 0), value)
        if leaf in self._last and self._buckets:
            self._missing[self._bucket_of[at]] -= 1
            # in the same order on all ranks
            while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
                self._send()

    def _skip_to(self, leaf: int, tree: TreeSum[Tensor | None]) -> None:
        """The micro-batches before this one give nothing."""
        while tree.end < leaf:
            tree.push((tree.end, 0), None)

    def _added(self, left: Tensor | None, right: Tensor | None) -> Tensor | None:
        if left is None or right is None:
            return right if left is None else left
        left.add_(right)
        if right is not self._given:  # whose memory autograd takes for the next gradient
            self._keep(right)
        return left

    def _keep(self, value: Tensor) -> None:
        if value.is_cpu:
            self._spare[_kind_of(value)].append(value)

    def total(self) -> list[Tensor | None]:
        """The sums over all ranks, None where no micro-batch has added a value; a collective."""
        self._given = None
        for tree in self._trees:
            self._skip_to(self._own.stop, tree)
        if not self._buckets:
            return [tree.total() for tree in self._trees]
        present = torch.tensor([any(value is not None for _, value in tree.nodes) for tree in self._trees])
        while len(self._sent) < len(self._buckets):
            self._send()
        # on the host, as it must not wait for a device
        presence = dist.all_reduce(present, dist.ReduceOp.MAX, agreement.cpu_group("gradients"), async_op=True)
        gathering = [self._gather(work, received) for work, _, (_, received) in self._sent]
        result: list[Tensor | None] = [None] * len(self._like)
        for bucket, (_, _, in_use), (work, summed) in zip(self._buckets, self._sent, gathering, strict=True):
            work.wait()
            for at, part in self._parts(bucket, summed):
                # in memory of its own, aligned as on one process: the order of a norm's additions may depend on it
                like = self._like[at]
                result[at] = torch.empty_like(like).copy_(part.view(like.shape))
            for free in (*in_use, summed):
                self._keep(free)
        presence.wait()
        return [value if is_there else None for value, is_there in zip(result, present.tolist(), strict=True)]

    def _parts(self, bucket: Sequence[int], row: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The part of a row that each sum of a bucket has."""
        sizes = [self._like[at].numel() for at in bucket]
        return zip(bucket, row[: sum(sizes)].split(sizes), strict=True)

    def _send(self) -> None:
        """Begin to exchange the next bucket: each rank gets the nodes of all ranks for its chunk of the bucket."""
        bucket, ranks = self._buckets[len(self._sent)], len(self._nodes)
        first, size = self._like[bucket[0]], sum(self._like[at].numel() for at in bucket)
        nodes = [len(of_rank) for of_rank in self._nodes]
        own, chunk = nodes[agreement.rank()], -(-size // ranks)
        rows = self._memory((own, ranks * chunk), first)
        for at in bucket:
            self._skip_to(self._own.stop, self._trees[at])
        for number, row in enumerate(rows):
            row[size:] = ABSENT
            for at, part in self._parts(bucket, row):
                if (value := self._trees[at].nodes[number][1]) is None:
                    part.fill_(ABSENT)
                else:
                    part.copy_(value.reshape(-1))
                    self._keep(value)
        sent = rows.view(own, ranks, chunk).transpose(0, 1).reshape(ranks * own, chunk)
        received = self._memory((sum(nodes), chunk), first)
        group = gradient_group(rows.device)
        work = dist.all_to_all_single(received, sent, nodes, [own] * ranks, group=group, async_op=True)
        self._sent.append((work, sent, (rows, received)))

    def _gather(self, work: dist.Work, received: Tensor) -> tuple[dist.Work, Tensor]:
        """Sum this rank's chunk of a bucket that was exchanged, and begin to gather the chunks of all ranks."""
        work.wait()
        tree: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for node, value in zip(chain(*self._nodes), received, strict=True):
            tree.push(node, value)
        total = tree.total()
        summed = self._memory((len(self._nodes) * len(total),), total)
        # torch 2.13 has renamed it
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(summed, total, group=gradient_group(total.device), async_op=True), summed

    def _memory(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of any content for an exchange."""
        new = torch.empty(shape, dtype=like.dtype, device=exchanged_on(like.device))
        free = self._spare[_kind_of(new)]
        return free.pop() if free else new


def _buckets(like: Sequence[Tensor]) -> list[list[int]]:
    """The sums that are exchanged together: of one dtype and device, in the reverse order."""
    buckets: list[list[int]] = []
    room: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for at in reversed(range(len(like))):
        kind = like[at].dtype, like[at].device
        bucket, size = room.pop(kind, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(at)
        if (size := size + like[at].nbytes) < _BUCKET_BYTES:
            room[kind] = bucket, size
    return buckets


def _kind_of(value: Tensor) -> Any:
    return value.shape, value.stride(), value.dtype


def exchanged_on(device: torch.device) -> torch.device:
    """Where ranks exchange what is on ``device``: gloo sends from the host's memory only."""
    backend = dict(part.split(":") for part in dist.get_backend_config().split(",")).get(device.type)
    return torch.device("cpu") if backend in (None, "gloo") else device


def gradient_group(device: torch.device) -> dist.ProcessGroup | None:
    """The group that exchanges what is on ``device``, which :func:`exchanged_on` gave.

    On the CPU one of its own, so that no user's message mixes in.
    """
    return agreement.cpu_group("gradients") if device.type == "cpu" else dist.group.WORLD
