"""A declared mesh: ranks of a tensor-parallel group are one data-parallel rank in everything that shares out data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ignite.engine import Events
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

from ignite_engine import Trainer, data_rank, data_size, loader, use_mesh
from ignite_engine.data.loader import resumable
from ignite_engine.data.source import DataSource
from ignite_engine.handlers import Throughput
from ignite_engine.step.micro_batches import micro_batch_scales
from tests.builders import Numbers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def indices(data: Any) -> list[list[int]]:
    """Which samples of ``Numbers`` each batch holds."""
    known = data.dataset.dataset.inputs
    return [[int((known == row).all(dim=1).nonzero()) for row in inputs] for inputs, _ in data]


def layout() -> dict[str, Any]:
    """Everything here that depends on the data-parallel rank."""
    source = DataSource(loader(Numbers(9), 2), 2)
    source.agree_lengths()
    source.position.batch = 2
    trainer, seen = Trainer(lambda engine, batch: len(batch[0])), list[dict[str, float]]()
    Throughput().attach(trainer, Events.EPOCH_COMPLETED)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(dict(trainer.state.metrics)))
    trainer.run(loader(Numbers(8), 2), max_epochs=1)
    metrics = seen[-1]
    sampler: Any = DistributedSampler(Numbers(8), data_size(), data_rank(), shuffle=False)  # type: ignore[arg-type]
    return {
        "place": (data_rank(), data_size()),
        "batches": indices(loader(Numbers(9), 2, shuffle=True, seed=1)),
        "rebuilt": type(resumable(DataLoader(Numbers(8), 2, sampler=sampler)).sampler).__name__,
        "lengths": source.lengths,
        "padded": source.padded(2),
        "saved on": source.state_dict()["ranks"],
        "equal": micro_batch_scales([0, 0], group_total=2 * data_size()),
        "weighted": micro_batch_scales([1.0 + data_rank(), 2.0], weight_fn=float),
        "samples per step": metrics["throughput/samples_per_s"] / metrics["throughput/steps_per_s"],
    }


def refused(mesh: Any) -> str:
    with pytest.raises(ValueError) as error:
        use_mesh(mesh)
    return str(error.value)


def one_of_four_ranks(rank: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    results: dict[str, Any] = {"world": layout()}
    results["returned"] = (
        use_mesh(square := init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))) is square
    )
    results["data, tensor"] = layout()
    use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard")))
    results["tensor, data"] = layout()
    use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    results["hsdp"] = layout()
    results["unknown"] = refused(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pp")))
    results["nameless"] = refused(init_device_mesh("cpu", (4,)))
    results["part"] = refused(square["tensor"])
    use_mesh(square)
    dist.destroy_process_group()
    results["ended"] = data_rank(), data_size()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=4)
    results["new group"] = data_rank(), data_size()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("mesh")
    mp.spawn(one_of_four_ranks, args=(str(folder),), nprocs=4)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


def test_without_a_tensor_dimension_every_rank_has_data_of_its_own(ranks: list[dict[str, Any]]) -> None:
    for name in ("world", "hsdp"):
        assert [each[name]["place"] for each in ranks] == [(rank, 4) for rank in range(4)]
    dealt = [index for each in ranks for batch in each["world"]["batches"] for index in batch]
    assert sorted(dealt) == list(range(9))
    assert ranks[0]["hsdp"] == ranks[0]["world"] | {"samples per step": ranks[0]["hsdp"]["samples per step"]}


@pytest.mark.parametrize(("name", "order"), [("data, tensor", [0, 0, 1, 1]), ("tensor, data", [0, 1, 0, 1])])
def test_ranks_of_a_tensor_parallel_group_share_data_lengths_and_weights(
    ranks: list[dict[str, Any]], name: str, order: list[int]
) -> None:
    found = [each[name] for each in ranks]
    assert [each["place"] for each in found] == [(place, 2) for place in order]
    for each, place in zip(found, order, strict=True):
        first = found[order.index(place)]
        assert each["batches"] == first["batches"]
        # 9 samples on two data ranks: 5 and 4, so 3 and 2 batches of 2
        assert each["lengths"] == [3, 2]
        assert each["padded"] == (1 + place, 1)
        assert each["saved on"] == 2
        assert each["equal"] == [0.5, 0.5]
        # weights 1 and 2 on data rank 0, 2 and 2 on data rank 1
        assert each["weighted"] == [(1.0 + place) * 2 / 7, 2.0 * 2 / 7]
        assert each["samples per step"] == pytest.approx(4.0)
        assert each["rebuilt"] == "ResumableSampler"
    dealt = [index for place in (0, 1) for batch in found[order.index(place)]["batches"] for index in batch]
    assert sorted(dealt) == list(range(9))


def test_mesh_that_does_not_say_who_shares_data_is_one_line(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["returned"]
        assert "got 'pp'" in each["unknown"] and "dp_shard" in each["unknown"] and "tensor" in each["unknown"]
        assert "got none" in each["nameless"]
        assert "all 4 ranks" in each["part"] and "\n" not in each["part"]


def test_mesh_ends_with_its_process_group(ranks: list[dict[str, Any]]) -> None:
    assert [each["ended"] for each in ranks] == [(0, 1)] * 4
    assert [each["new group"] for each in ranks] == [(rank, 4) for rank in range(4)]
