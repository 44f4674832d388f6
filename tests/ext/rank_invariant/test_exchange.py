"""What ranks exchange sums up to the tree over all micro-batches."""

import pytest
import torch

from ignite_engine.ext.rank_invariant.exchange import Exchange
from ignite_engine.ext.rank_invariant.gradient_buffers import GradientBuffers
from ignite_engine.ext.rank_invariant.tree_sum import nodes_of
from tests.kit.tiny import on_two_ranks

SUBTREES = [[2.0**24, 1.0], [1.0]]
"""Of the leaves 0 to 2 and 3; from the left, the ones would be lost."""


@pytest.mark.distributed
def test_each_rank_has_the_sum_in_the_order_of_the_tree(tmp_path):
    def case(rank):
        buffers = GradientBuffers([torch.ones(5)], ranks=2)
        own = [buffers.take() for _ in SUBTREES[rank]]
        for taken, value in zip(own, SUBTREES[rank], strict=True):
            taken.views[0].fill_(value)
        (total,) = Exchange(buffers).sum(own, [nodes_of(0, 3), nodes_of(3, 4)])
        return {"total": total.tolist()}

    assert on_two_ranks(case, tmp_path / "meeting")["total"] == [[2.0**24 + 2] * 5] * 2
