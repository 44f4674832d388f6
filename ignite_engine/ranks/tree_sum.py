"""Sums over micro-batches in one fixed binary tree, whatever process computed which of them.

The leaves are the micro-batches 0 to n-1 of an iteration, and a node at ``(start, level)`` is the sum over the
``2**level`` leaves from ``start`` on. Siblings are added as soon as both exist, and what is left at the end is added
from the right: the tree over a power of two of leaves, of which those from n on are absent. Contiguous leaves that one
rank holds make at most ``2 * log2(n)`` nodes, which the tree over all ranks is continued with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]


class TreeSum(Generic[T]):
    """Adds values in the order of the tree; ``add(left, right)`` may change ``left``, and returns their sum."""

    def __init__(self, add: Callable[[T, T], T], first: int = 0) -> None:
        self._add = add
        self.nodes: list[tuple[Node, T]] = []
        """Subtrees whose sibling is missing, from the left."""
        self.end = first
        """The next leaf."""

    def push(self, node: Node, value: T) -> None:
        """Add the next subtree."""
        self.end = node[0] + (1 << node[1])
        # the right child of its parent follows the left one of the same size
        while self.nodes and self.nodes[-1][0][1] == node[1] and node[0] >> node[1] & 1:
            node, left = self.nodes.pop()
            value, node = self._add(left, value), (node[0], node[1] + 1)
        self.nodes.append((node, value))

    def total(self) -> T:
        """The sum over all leaves; nothing may be pushed afterwards."""
        _, total = self.nodes.pop()
        while self.nodes:
            total = self._add(self.nodes.pop()[1], total)
        return total


def nodes_of(leaves: range) -> list[Node]:
    """The nodes to which these consecutive leaves sum up."""
    tree: TreeSum[None] = TreeSum(lambda left, right: None)
    for leaf in leaves:
        tree.push((leaf, 0), None)
    return [node for node, _ in tree.nodes]
