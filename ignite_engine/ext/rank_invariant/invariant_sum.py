"""Sums over the micro-batches of all ranks in the order of one tree, whichever rank computed which of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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


class InvariantSum:
    """The sums of several tensors, each over what the micro-batches give.

    Each is added as soon as it is known, while it is in the cache; what is kept is at most one tensor of each for every
    level of the tree.

    Args:
        leaves: the micro-batches of each rank, by rank; together they are those of the iteration from 0 on.
        count: how many tensors.
        spare: is used and filled. On the CPU memory that is new costs more than the additions do, as the system clears
            each of its pages when it is touched first; accelerators keep what was freed by themselves.
    """

    def __init__(self, leaves: Sequence[range], count: int, spare: Spare) -> None:
        self._leaves, self._own, self._spare = leaves, leaves[agreement.rank()], spare
        self._trees = [TreeSum[Tensor | None](self._added, self._own.start) for _ in range(count)]
        self._given: Tensor | None = None

    def add(self, at: int, leaf: int, value: Tensor) -> None:
        """The micro-batch ``leaf`` gives ``value``, which is written to, to the sum number ``at``.

        Raises:
            ValueError: it gave one already.
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

    def total(self, like: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums over all ranks, None where no micro-batch gives anything; a collective.

        Args:
            like: a tensor of the shape, strides, dtype and device of each.
        """
        self._given = None
        for tree in self._trees:
            self._skip_to(self._own.stop, tree)
        if len(self._leaves) == 1:
            return [tree.total() for tree in self._trees]
        own = [[value for _, value in tree.nodes] for tree in self._trees]
        present = torch.tensor([any(value is not None for value in values) for values in own], dtype=torch.uint8)
        # on the host, as it must not wait for a device, and while the values are exchanged
        presence = dist.all_reduce(present, dist.ReduceOp.MAX, agreement.cpu_group("gradients"), async_op=True)
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for at, tensor in enumerate(like):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(at)
        result: list[Tensor | None] = [None] * len(like)
        for (dtype, device), alike in kinds.items():
            sizes, ranks = [like[at].numel() for at in alike], len(self._leaves)
            shape = len(own[0]), -(-sum(sizes) // ranks) * ranks
            rows = self._memory(torch.empty(shape, dtype=dtype, device=exchanged_on(device)))
            for node, row in enumerate(rows):
                row[sum(sizes) :] = ABSENT
                for at, part in zip(alike, row[: sum(sizes)].split(sizes), strict=True):
                    if (value := own[at][node]) is None:
                        part.fill_(ABSENT)
                    else:
                        part.copy_(value.reshape(-1))
                        self._keep(value)
            summed = self._over_ranks(rows)
            for at, part in zip(alike, summed[: sum(sizes)].split(sizes), strict=True):
                # in memory of its own, aligned as on one process: the order of a norm's additions may depend on it
                result[at] = torch.empty_like(like[at]).copy_(part.view(like[at].shape))
            for each in (rows, summed):
                self._keep(each)
        presence.wait()
        return [value if is_there else None for value, is_there in zip(result, present.tolist(), strict=True)]

    def _memory(self, new: Tensor) -> Tensor:
        """``new``, which nothing was written to, or memory of its kind that is free."""
        free = self._spare[_kind_of(new)]
        return free.pop() if free else new

    def _over_ranks(self, rows: Tensor) -> Tensor:
        """The sum of the nodes of all ranks, of which ``rows`` are this one's: each rank sums up a chunk of them."""
        ranks, nodes = len(self._leaves), [nodes_of(leaves) for leaves in self._leaves]
        group = gradient_group(rows.device)
        chunk = rows.shape[1] // ranks
        sent = rows.view(len(rows), ranks, chunk).transpose(0, 1).reshape(ranks * len(rows), chunk)
        received = self._memory(sent.new_empty(sum(map(len, nodes)), chunk))
        dist.all_to_all_single(received, sent, [len(of_rank) for of_rank in nodes], [len(rows)] * ranks, group=group)
        tree: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for node, value in zip(chain(*nodes), received, strict=True):
            tree.push(node, value)
        summed = self._memory(sent.new_empty(ranks * chunk))
        # torch 2.13 has renamed it
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(summed, tree.total(), group=group)
        self._keep(received)
        return summed


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
