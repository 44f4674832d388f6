"""A declared mesh: ranks of a tensor-parallel group are one data-parallel rank in everything that shares out data."""

from threading import Thread
from unittest.mock import patch

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from ignite.metrics import EpochMetric, Metric
from ignite.metrics.metric import sync_all_reduce
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, create_evaluator, loader
from ignite_engine.ranks import data_rank, data_size, use_mesh
from ignite_engine.ranks.mesh import metrics_reduce
from tests.kit.processes import ranks, start_ranks
from tests.kit.refusals import refuses

NUMBERS = torch.arange(9.0)


def trained_on(data):
    """What this rank was given in each iteration, with the batches of all data-parallel ranks together."""
    seen = []

    def update(engine, batch):
        real = batch[: len(batch) - engine.state.group.padding]
        seen.append(([each.tolist() for each in real], engine.state.group.total))

    Trainer(update, 2).run(data, max_epochs=1)
    return seen


class Seen(Metric):
    """The sum of what it was given, as a metric of Ignite reduces it."""

    def reset(self):
        self._sum = torch.zeros(())

    def update(self, output):
        self._sum += output.sum()

    @sync_all_reduce("_sum")
    def compute(self):
        return self._sum.item()


def evaluated():
    """9 samples evaluated: their count, a sum, and all of them sorted; and whether Ignite counts all ranks again."""
    data = TensorDataset(NUMBERS)

    def predict(model, batch):
        return batch[0], batch[0]

    def in_order(predictions, targets):
        return float((predictions.sort().values * torch.arange(1.0, 1.0 + len(predictions))).sum())

    metrics = {
        "count": Seen(lambda output: torch.ones(len(output[0]))),
        "sum": Seen(lambda output: output[0]),
        "in order": EpochMetric(in_order),
    }
    evaluator = create_evaluator(nn.Linear(1, 1), predict, metrics)
    evaluator.run(loader(data, 2))
    return evaluator.state.metrics, (idist.get_world_size(), idist.get_rank())


def layout(rank, shape, names):
    """Everything here that depends on the data-parallel rank."""
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        assert use_mesh(mesh) is mesh
    return {
        "place": (data_rank(), data_size()),
        "seen": trained_on(loader(NUMBERS, 2, shuffle=True, seed=1)),
        "evaluated": evaluated(),
    }


MESHES = {  # with the data-parallel place of each of four ranks
    "none": ((), (), [0, 1, 2, 3]),
    "hsdp": ((2, 2), ("replicate", "shard"), [0, 1, 2, 3]),
    "data, tensor": ((2, 2), ("data", "tensor"), [0, 0, 1, 1]),
    "tensor, data": ((2, 2), ("tp", "dp_shard"), [0, 1, 0, 1]),
    "hsdp and tensor": ((2, 1, 2), ("dp_replicate", "dp_shard", "tp"), [0, 0, 1, 1]),
    "tensor": ((1, 4), ("data", "tensor"), [0, 0, 0, 0]),
}


@pytest.mark.row("I2")
@pytest.mark.parametrize("name", MESHES)
def test_ranks_of_a_tensor_parallel_group_share_data_and_are_counted_once(name):
    shape, names, order = MESHES[name]
    size = max(order) + 1
    found = ranks(4, layout, shape, names)

    assert [each["place"] for each in found] == [(place, size) for place in order]
    firsts = [found[order.index(place)] for place in range(size)]
    for each, place in zip(found, order, strict=True):
        assert each["seen"] == firsts[place]["seen"]
        assert each["evaluated"][0] == {"count": 9.0, "sum": 36.0, "in order": 240.0}
    assert [each["evaluated"][1] for each in found] == [(4, rank) for rank in range(4)], "Ignite counts all again"
    seen = [number for each in firsts for group, _ in each["seen"] for batch in group for number in batch]
    assert sorted(seen) == [*range(9)]
    if size == 2:  # 5 and 4 samples, so 3 and 2 batches, in groups of 2
        assert [[len(group) for group, _ in each["seen"]] for each in firsts] == [[2, 1], [2, 0]]
        assert [[total for _, total in each["seen"]] for each in firsts] == [[4, 1]] * 2


def test_without_a_mesh_or_its_process_group_every_rank_has_data_of_its_own(tmp_path):
    def work(rank):
        use_mesh(init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")))
        use_mesh(None)
        undeclared = data_rank(), data_size()
        use_mesh(init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")))
        dist.barrier()
        dist.destroy_process_group()
        ended = data_rank(), data_size()
        dist.init_process_group("gloo", f"file://{tmp_path}/again", rank=rank, world_size=2)
        dist.barrier()  # a peer may not be connected yet
        return undeclared, ended, (data_rank(), data_size())

    assert [each.answer() for each in start_ranks(2, work)] == [((rank, 2), (0, 1), (rank, 2)) for rank in range(2)]


def test_a_mesh_that_says_nothing_of_the_data_is_refused():
    def work(rank):
        both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        unknown = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "pp"))
        for mesh, word in ((unknown, "pp"), (init_device_mesh("cpu", (2,)), "names"), (both["data"], "ranks")):
            refuses(lambda mesh=mesh: use_mesh(mesh), ValueError, word)
        return data_size()

    assert ranks(2, work) == [2, 2]


def test_metrics_of_one_thread_alone_are_reduced_as_it_says():
    """Another one may train meanwhile, or evaluate otherwise."""
    seen = []

    def look():
        seen.append(idist.all_gather("a"))

    with metrics_reduce(), patch.object(idist.utils, "all_gather", lambda value, **options: options):
        thread = Thread(target=look)
        thread.start()
        thread.join()
        look()
    assert seen == [{}, {"group": None}]
