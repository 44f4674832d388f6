"""The tree over micro-batches: the same additions wherever it is cut."""

import itertools

import pytest

from ignite_engine.ext.rank_invariant.tree_sum import TreeSum, nodes_of


def written(first, end):
    """The subtrees of some leaves, as they would be written by hand."""
    tree = TreeSum(lambda left, right: f"({left}+{right})")
    for leaf in range(first, end):
        tree.push((leaf, 0), str(leaf))
    return tree.nodes


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        (1, "0"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_the_tree_is_that_over_a_power_of_two(leaves, expected):
    tree = TreeSum(lambda left, right: f"({left}+{right})")
    for leaf in range(leaves):
        tree.push((leaf, 0), str(leaf))

    assert tree.total() == expected


@pytest.mark.parametrize("leaves", range(1, 12))
def test_every_way_to_cut_it_adds_in_the_same_order(leaves):
    whole = TreeSum(lambda left, right: f"({left}+{right})")
    for node, text in written(0, leaves):
        whole.push(node, text)
    expected = whole.total()

    for cuts in itertools.combinations_with_replacement(range(leaves + 1), 2):
        tree = TreeSum(lambda left, right: f"({left}+{right})")
        for first, end in itertools.pairwise((0, *cuts, leaves)):
            assert [node for node, _ in written(first, end)] == nodes_of(first, end)
            for node, text in written(first, end):
                tree.push(node, text)
        assert tree.total() == expected, cuts


def test_a_rank_keeps_at_most_two_buffers_per_level():
    assert max(len(nodes_of(first, end)) for first in range(64) for end in range(first, 65)) <= 2 * 6
    assert len(nodes_of(8, 16)) == 1, "an aligned share is one subtree: as much traffic as the usual reduction"
