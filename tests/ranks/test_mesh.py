"""A declared mesh: ranks of a tensor-parallel group are one data-parallel rank in everything that shares out data."""

import itertools

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from ignite.metrics import EpochMetric, Metric
from ignite.metrics.metric import sync_all_reduce
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ignite_engine import Trainer, create_evaluator, loader
from ignite_engine.data.loader import resumable
from ignite_engine.data.shares import source_of
from ignite_engine.handlers import Throughput, throughput
from ignite_engine.ranks import data_rank, data_size, use_mesh
from ignite_engine.step.micro_batches import micro_batch_scales
from tests.kit.tiny import Numbers
from tests.ranks.forkserver import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def indices(data):
    """Which samples of ``Numbers`` each batch holds."""
    known = data.dataset.dataset.inputs
    return [[int((known == row).all(dim=1).nonzero()) for row in inputs] for inputs, _ in data]


def layout():
    """Everything here that depends on the data-parallel rank."""
    source = source_of(loader(Numbers(9), 2), 2, None)
    source.agree_lengths()
    trainer, seen = Trainer(lambda engine, batch: len(batch[0])), list[dict[str, float]]()
    throughput.perf_counter = itertools.count().__next__
    for samples_fn in (None, lambda batch: 0):  # which writes steps
        Throughput(samples_fn=samples_fn).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(dict(trainer.state.metrics)))
    trainer.run(loader(Numbers(8), 2), max_epochs=1)
    metrics = seen[-1]
    sampler = DistributedSampler(Numbers(8), data_size(), data_rank(), shuffle=False)
    return {
        "place": (data_rank(), data_size()),
        "batches": indices(loader(Numbers(9), 2, shuffle=True, seed=1)),
        "rebuilt": type(resumable(DataLoader(Numbers(8), 2, sampler=sampler)).sampler).__name__,
        "longest": source.batches,
        "padded": [source.padded(len(group)) for group in source],
        "saved on": source.state_dict()["ranks"],
        "equal": micro_batch_scales([0, 0], group_total=2 * data_size()),
        "weighted": micro_batch_scales([1.0 + data_rank(), 2.0], weight_fn=float),
        "samples per step": metrics["throughput/samples_per_s"] / metrics["throughput/steps_per_s"],
        "evaluated": evaluated(),
    }


class Seen(Metric):
    """The sum of what it was given, as a metric of Ignite reduces it."""

    def reset(self):
        self._sum = torch.zeros(())

    def update(self, output):
        self._sum += output.sum()

    @sync_all_reduce("_sum")
    def compute(self):
        return self._sum.item()


class Broken(Seen):
    def compute(self):
        raise KeyError(idist.get_world_size())


def evaluated():
    """9 samples evaluated: their count, a sum, and all of them sorted; and whether Ignite counts all ranks again."""
    data = TensorDataset(torch.arange(9.0))

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
    broken = create_evaluator(nn.Linear(1, 1), predict, {"broken": Broken(lambda output: output[0])})
    with pytest.raises(KeyError) as error:
        broken.run(loader(data, 2))
    return {**evaluator.state.metrics, "size": error.value.args[0], "after": (idist.get_world_size(), idist.get_rank())}


def refused(mesh):
    with pytest.raises(ValueError) as error:
        use_mesh(mesh)
    return str(error.value)


def one_of_four_ranks(rank, folder):
    results = {"world": layout()}
    results["returned"] = (
        use_mesh(square := init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))) is square
    )
    results["data, tensor"] = layout()
    use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard")))
    results["tensor, data"] = layout()
    use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    results["hsdp"] = layout()
    use_mesh(init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp")))
    results["hsdp and tensor"] = layout()
    use_mesh(init_device_mesh("cpu", (1, 4), mesh_dim_names=("data", "tensor")))
    results["evaluated by tensor"] = evaluated()
    use_mesh(None)
    results["undeclared"] = data_rank(), data_size()
    results["unknown"] = refused(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pp")))
    results["nameless"] = refused(init_device_mesh("cpu", (4,)))
    results["part"] = refused(square["tensor"])
    use_mesh(square)
    dist.destroy_process_group()
    results["ended"] = data_rank(), data_size()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=4)
    results["new group"] = data_rank(), data_size()
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    on_ranks(4, one_of_four_ranks, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


def test_without_a_tensor_dimension_every_rank_has_data_of_its_own(ranks):
    for name in ("world", "hsdp"):
        assert [each[name]["place"] for each in ranks] == [(rank, 4) for rank in range(4)]
    dealt = [index for each in ranks for batch in each["world"]["batches"] for index in batch]
    assert sorted(dealt) == list(range(9))
    changing = {"samples per step": ranks[0]["hsdp"]["samples per step"]}
    assert ranks[0]["hsdp"] == ranks[0]["world"] | changing


@pytest.mark.row("I2")
@pytest.mark.parametrize(
    ("name", "order"),
    [("data, tensor", [0, 0, 1, 1]), ("tensor, data", [0, 1, 0, 1]), ("hsdp and tensor", [0, 0, 1, 1])],
)
def test_ranks_of_a_tensor_parallel_group_share_data_lengths_and_weights(ranks, name, order):
    found = [each[name] for each in ranks]
    assert [each["place"] for each in found] == [(place, 2) for place in order]
    for each, place in zip(found, order, strict=True):
        first = found[order.index(place)]
        assert each["batches"] == first["batches"]
        # 9 samples on two data ranks: 5 and 4, so 3 and 2 batches of 2
        assert each["longest"] == 3
        assert each["padded"] == [(0, 4), (place, 1)]
        assert each["saved on"] == 2
        assert each["equal"] == [0.5, 0.5]
        # weights 1 and 2 on data rank 0, 2 and 2 on data rank 1
        assert each["weighted"] == [(1.0 + place) * 2 / 7, 2.0 * 2 / 7]
        assert each["samples per step"] == pytest.approx(4.0)
        assert each["rebuilt"] == "ResumableSampler"
    dealt = [index for place in (0, 1) for batch in found[order.index(place)]["batches"] for index in batch]
    assert sorted(dealt) == list(range(9))


def test_mesh_ends_with_its_process_group(ranks):
    assert [each["ended"] for each in ranks] == [(0, 1)] * 4
    assert [each["new group"] for each in ranks] == [(rank, 4) for rank in range(4)]
    assert [each["undeclared"] for each in ranks] == [(rank, 4) for rank in range(4)]


@pytest.mark.row("I2")
def test_metrics_count_a_tensor_parallel_group_once(ranks):
    found = {"world": 4, "hsdp": 4, "data, tensor": 2, "tensor, data": 2, "hsdp and tensor": 2}
    for rank, each in enumerate(ranks):
        for name, size in found.items():
            evaluated = {"count": 9.0, "sum": 36.0, "in order": 240.0, "size": size, "after": (4, rank)}
            assert each[name]["evaluated"] == evaluated
        assert each["evaluated by tensor"] == evaluated | {"size": 1}
