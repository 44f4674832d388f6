"""This rank's part of the tree: gradients are added as soon as autograd has them, while they are in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from ignite_engine.ext.rank_invariant.gradient_buffers import GradientBuffers, Sum
from ignite_engine.ext.rank_invariant.tree_sum import Node, TreeSum, are_siblings


class GradientTree:
    """Sums of the gradients of the parameters of ``buffers`` over micro-batches, each a leaf, from the left.

    Of two siblings that are leaves autograd adds the second to the first, in ``grad``. Then a hook adds them, parameter
    by parameter, to the subtrees before them, or keeps them in a buffer.

    Args:
        is_whole: all leaves are this rank's.
    """

    def __init__(self, buffers: GradientBuffers, *, is_whole: bool) -> None:
        self.parameters, self._buffers, self._is_whole = buffers.parameters, buffers, is_whole
        buffers.reset()
        self._tree: TreeSum[Sum | None] = TreeSum(self._add)
        self._node: Node | None = None
        """The node of the gradients that are in ``grad``."""
        self._merged: list[Node] = []
        """The subtrees that those are added to, the last one first."""
        self._targets: list[Sum] = []
        """What they are added to, one after the other; the last one keeps the sum."""
        self._stays = False
        """What is in ``grad`` stays there."""
        self._total_in_grad = False
        self._arrived = bytearray(len(self.parameters))
        self._fault: str | None = None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """For the forwards and backwards of all micro-batches."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, place))
            for place, parameter in enumerate(self.parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def before(self, leaf: int, *, sibling_follows: bool, is_last: bool) -> None:
        """Before the backward of ``leaf``.

        Args:
            sibling_follows: it is a left one, and its sibling will have a backward here.
            is_last: of this rank.
        """
        self._node = (leaf, 0) if self._node is None else (self._node[0], 1)
        self._arrived[:] = bytes(len(self._arrived))
        self._merged, self._targets, self._stays = [], [], sibling_follows
        if sibling_follows:
            return
        node = self._node
        for left, kept in reversed(self._tree.nodes):
            if not (is_last and self._is_whole) and not are_siblings(left, node):
                break
            node = left[0], max(left[1], node[1]) + 1
            self._merged.append(node)
            if kept is not None:
                self._targets.append(kept)
        if not self._targets:
            if is_last and self._is_whole:
                self._stays = self._total_in_grad = True
            else:
                self._targets = [self._buffers.take()]

    def after(self) -> None:
        """After it.

        Raises:
            ValueError: a gradient is sparse, or came in several parts.
        """
        if self._fault is not None:
            raise ValueError(f"rank_invariant cannot sum {self._fault}.")
        if self._stays:
            return
        for place, arrived in enumerate(self._arrived):
            if not arrived:
                self._keep(place)
        assert self._node is not None
        node, self._node = self._node, None
        if self._merged:
            node = self._merged[-1]
            del self._tree.nodes[-len(self._merged) :]
        for merged in self._targets[:-1]:
            self._buffers.give_back(merged)
        self._tree.nodes.append((node, self._targets[-1]))

    def leave_out(self, leaf: int) -> None:
        """In the place of a leaf that adds nothing."""
        self._tree.push((leaf, 0), None)

    def total(self) -> list[Tensor | None]:
        """The sum over all leaves, where all are this rank's."""
        if self._total_in_grad:
            return [parameter.grad for parameter in self.parameters]
        total = self._tree.total()
        assert total is not None
        return [view if present else None for view, present in zip(total.views, total.present, strict=True)]

    def sums(self) -> list[Sum]:
        """The sums of the subtrees whose sibling is not this rank's, from the left; what is absent adds nothing."""
        found = [self._buffers.take() if kept is None else kept for _, kept in self._tree.nodes]
        for subtree in found:
            subtree.fill_absent()
        return found

    def _arrive(self, place: int, parameter: Tensor) -> None:
        if self._arrived[place]:
            self._fault = (
                f"the gradient of a parameter of shape {tuple(parameter.shape)}, which came in several parts in one "
                "backward: use torch.utils.checkpoint with use_reentrant=False"
            )
        self._arrived[place] = 1
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._fault = "sparse gradients: use sparse=False in the embeddings"
        elif not self._stays:
            self._keep(place)

    def _keep(self, place: int) -> None:
        """Add what is in ``grad`` to the targets."""
        parameter = self.parameters[place]
        value, parameter.grad = parameter.grad, None
        for target in self._targets:
            if target.present[place]:
                view = target.views[place]
                value = view if value is None else view.add_(value)
        last = self._targets[-1]
        if value is not None and not last.present[place]:
            last.views[place].copy_(value)
            last.present[place] = 1

    def _add(self, left: Sum | None, right: Sum | None) -> Sum | None:
        if left is None or right is None:
            return right if left is None else left
        for place, present in enumerate(right.present):
            if present and left.present[place]:
                left.views[place].add_(right.views[place])
            elif present:
                left.views[place].copy_(right.views[place])
                left.present[place] = 1
        self._buffers.give_back(right)
        return left
