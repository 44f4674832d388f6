"""This rank's part of the tree: gradients are added as soon as autograd has them, while they are in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from ignite_engine.step.tree_sum import Gradients, Node, TreeSum, add_gradients, are_siblings


class GradientTree:
    """Sums of the gradients of ``parameters`` over micro-batches, each a leaf, from the left.

    Of two siblings that are leaves autograd adds the second to the first, in ``grad``. Larger subtrees are added in a
    hook, parameter by parameter.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._tree: TreeSum[Gradients] = TreeSum(add_gradients)
        self._node: Node | None = None
        """Of the gradients that are in ``grad``."""
        self._lefts: list[Gradients] = []
        """The subtrees that those are added to, the smallest first."""
        self._arrived = bytearray(len(parameters))
        self._fault: str | None = None

    @property
    def nodes(self) -> list[tuple[Node, Gradients]]:
        """Subtrees whose sibling is not this rank's, from the left."""
        return self._tree.nodes

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """For the forwards and backwards of all micro-batches."""
        hooks = [
            each.register_post_accumulate_grad_hook(partial(self._arrive, place))
            for place, each in enumerate(self.parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def before(self, leaf: int, *, sibling_follows: bool) -> None:
        """Before the backward of ``leaf``.

        Args:
            sibling_follows: it is a left one, and its sibling will have a backward here.
        """
        self._node = (leaf, 0) if self._node is None else (self._node[0], 1)
        self._arrived[:] = bytes(len(self._arrived))
        self._lefts, node = [], self._node
        if not sibling_follows:
            for left, gradients in reversed(self._tree.nodes):
                if not are_siblings(left, node):
                    break
                self._lefts.append(gradients)
                node = left[0], left[1] + 1
        self._sibling_follows = sibling_follows

    def after(self) -> None:
        """After it.

        Raises:
            ValueError: a gradient is sparse, or came in several parts.
        """
        if self._fault is not None:
            raise ValueError(f"rank_invariant cannot sum {self._fault}.")
        if self._sibling_follows:
            return
        assert self._node is not None
        for place, arrived in enumerate(self._arrived):
            if not arrived:
                self._add_to_lefts(place)
        gradients: Gradients = [each.grad for each in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        node, self._node = self._node, None
        for _ in self._lefts:
            (start, level), _ = self._tree.nodes.pop()
            node = start, level + 1
        self._tree.nodes.append((node, gradients))

    def leave_out(self, leaf: int) -> None:
        """In the place of a leaf that adds nothing."""
        self._tree.push((leaf, 0), [None] * len(self.parameters))

    def total(self) -> Gradients:
        """The sum over all leaves, where all are this rank's."""
        return self._tree.total()

    def _arrive(self, place: int, parameter: Tensor) -> None:
        if self._arrived[place]:
            self._fault = (
                f"the gradient of a parameter of shape {tuple(parameter.shape)}, which came in several parts in one "
                "backward: use torch.utils.checkpoint with use_reentrant=False"
            )
        self._arrived[place] = 1
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._fault = "sparse gradients: use sparse=False in the embeddings"
        elif self._lefts:
            self._add_to_lefts(place)

    def _add_to_lefts(self, place: int) -> None:
        parameter = self.parameters[place]
        value = parameter.grad
        for left in self._lefts:
            if (other := left[place]) is not None:
                value = other if value is None else other.add_(value)
        parameter.grad = value
