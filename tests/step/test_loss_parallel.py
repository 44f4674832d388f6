"""What the cross-entropy refuses before it computes, of logits as one of four ranks has them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from ignite_engine.step.loss_parallel import loss_parallel_context


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield init_device_mesh("cpu", (4,))
    finally:
        dist.destroy_process_group()


@pytest.mark.row("B8")
@pytest.mark.parametrize("is_named", [False, True])
def test_class_dimension_that_leaves_a_rank_empty_is_refused_on_a_rank_that_has_some(mesh, is_named):
    logits = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(1)], shape=torch.Size([3, 6]), stride=(6, 1))
    target = torch.zeros(3, dtype=torch.int64)
    with loss_parallel_context(), pytest.raises(ValueError, match="6 classes on 4 ranks leave 1 without one: pad the"):
        if is_named:
            functional.cross_entropy(input=logits, target=target)
        else:
            functional.cross_entropy(logits, target)
