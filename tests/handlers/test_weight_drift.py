"""Ranks that no longer hold the same weights are noticed, to the bit, and the first tensor is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, TrainingEvents, Update, loader
from ignite_engine.checkpointing.digests import hashed, hashes
from ignite_engine.errors import RanksDiffer
from ignite_engine.handlers import WeightDrift
from tests.builders import Numbers, linear, mse
from tests.ranks.forkserver import on_ranks


def flip_one_bit(tensor: Tensor, place: int) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.uint8)[place] ^= 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(9000),
        torch.randn(40_003, dtype=torch.float64),
        torch.randn(1001).to(torch.bfloat16),
        torch.tensor(2.0),
        torch.arange(7, dtype=torch.uint8),
        torch.randn(9, dtype=torch.complex64),
        torch.randn(8, dtype=torch.complex64).conj(),
        torch.tensor([True, False, True]),
        torch.randn(50)[1:10],  # not where a word begins
        torch.randn(6, 8).t(),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_hash_sees_one_bit_and_is_of_the_values(tensor: Tensor) -> None:
    before = hashed(tensor)
    same = tensor.resolve_conj().contiguous().clone()
    assert torch.equal(hashed(same), before) and before.dtype is torch.int64
    places = same.numel() * same.element_size()
    for place in {0, places // 2, places - 1} if tensor.dtype is not torch.bool else {}:
        flip_one_bit(torch.view_as_real(same) if same.is_complex() else same, place)
        assert not torch.equal(hashed(same), before), place
        flip_one_bit(torch.view_as_real(same) if same.is_complex() else same, place)
    assert torch.equal(hashed(same), before)


@pytest.mark.parametrize("count", [3, 100, 8192, 40_000])
def test_hash_sees_two_exchanged_elements(count: int) -> None:
    values = torch.randn(count)
    values[0], values[-1] = 1.0, -1.0  # they differ in one bit
    before = hashed(values)
    for one, other in {(0, 1), (0, count - 1), (count // 2, count - 1)}:
        swapped = values.clone()
        swapped[one], swapped[other] = values[other], values[one]
        assert not torch.equal(hashed(swapped), before), (one, other)


def test_hash_sees_the_place_in_a_row_and_of_a_row() -> None:
    seen = set()
    for place in (0, 1, 2, 251, 252, 502, 12_288):  # words of eight bytes, 251 to a row
        words = torch.zeros(16_384, dtype=torch.int64)
        words[place] = 1
        seen.add(int(hashed(words)))
    assert len(seen) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [40, 2000, 200_000])
def test_hash_sees_signs_that_are_the_highest_bits_of_words(count: int, dtype: torch.dtype) -> None:
    values = torch.randn(count, dtype=dtype)
    before = hashed(values)
    assert not torch.equal(hashed(-values), before)
    values[1], values[7] = 2.0, -2.0
    before = hashed(values)
    values[1], values[7] = -2.0, 2.0
    assert not torch.equal(hashed(values), before)


def test_hash_of_a_tensor_does_not_depend_on_those_beside_it() -> None:
    tensors = [torch.randn(10_000), torch.zeros(0), torch.randn(5), torch.tensor([True])]
    assert torch.equal(hashes(tensors), torch.stack([hashed(tensor) for tensor in tensors]))
    assert len(set(hashes(tensors).tolist())) == 4 and hashes([]).tolist() == []


def test_setting_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="on_drift must be 'raise' or 'warn', got 'stop'"):
        WeightDrift(on_drift="stop")


def test_on_one_process_nothing_is_compared() -> None:
    model = linear()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
    WeightDrift().attach(trainer, Events.ITERATION_COMPLETED)
    assert trainer.run(loader(Numbers(8), 2)).status == "completed"


# -- several ranks ----------------------------------------------------------------------------------------------------


def _run(
    wrapped: nn.Module, spoil: Callable[[Trainer], None] | None, drift: WeightDrift, optimizer: Any = torch.optim.Adam
) -> str:
    trainer = Trainer(Update(wrapped, optimizer(wrapped.parameters(), lr=0.01), mse))
    if spoil is not None:
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED(once=4), lambda: spoil(trainer))
    drift.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    try:
        trainer.run(loader(Numbers(48), 2), max_iters=6)
    except RanksDiffer as error:
        return str(error)
    return f"{trainer.state.status} {trainer.state.iteration}"


def _ddp_cases(rank: int, said: Callable[[], str]) -> dict[str, str]:
    def spoil_weight(trainer: Trainer) -> None:
        if rank == 1:
            flip_one_bit(trainer.update.model.module[2].weight, 4)  # type: ignore[attr-defined]

    def swap(trainer: Trainer) -> None:
        if rank == 1:
            with torch.no_grad():
                bias = trainer.update.model.module[0].bias  # type: ignore[attr-defined]
                bias[:2] = bias[:2].flip(0)

    def spoil_moment(trainer: Trainer) -> None:
        if rank == 1:
            (optimizer,) = trainer.update.optimizers.values()  # type: ignore[attr-defined]
            (*_, last) = optimizer.state.values()
            last["exp_avg_sq"] += 1.0

    found = {}
    for name, spoil, drift in (
        ("healthy", None, WeightDrift(optimizers=True)),
        ("one bit", spoil_weight, WeightDrift()),
        ("swap", swap, WeightDrift()),
        ("moment", spoil_moment, WeightDrift(optimizers=True)),
        ("warn", spoil_weight, WeightDrift(on_drift="warn")),
    ):
        found[name] = _run(DistributedDataParallel(linear()), spoil, drift)
    return found | {"said": said()}


def _sharded_cases(rank: int) -> dict[str, str]:
    def spoil(trainer: Trainer) -> None:
        if rank == 1:
            flip_one_bit(trainer.update.model[0].weight.to_local(), 0)  # type: ignore[attr-defined]

    found = {}
    for replicas, shards in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        for how in (None, spoil):
            name = f"{replicas} replicas{'' if how is None else ', one bit'}"
            found[name] = _run(fully_shard(linear(), mesh=mesh), how, WeightDrift(optimizers=True))
    return found


def _rank(rank: int, folder: str) -> None:
    path = Path(folder, f"{rank}.txt")
    logging.basicConfig(filename=path, format="%(message)s", force=True, level=logging.WARNING)
    torch.save(_ddp_cases(rank, path.read_text) | _sharded_cases(rank), f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("drift")
    on_ranks(2, _rank, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.distributed
def test_the_first_tensor_that_differs_is_named_on_every_rank(outcomes: list[dict[str, str]]) -> None:
    found = outcomes[0]
    assert {**found, "said": ""} == {**outcomes[1], "said": ""}
    assert found["healthy"] == "completed 6" and found["warn"] == "completed 6"
    start = "The ranks hold different weights at iteration 4: "
    assert found["one bit"].startswith(f"{start}2.weight on rank 1 differs from rank 0's by up to ")
    assert "by up to 0 (" not in found["one bit"] and "(1 of 4 tensors differ). All must" in found["one bit"]
    assert found["swap"].startswith(f"{start}0.bias on rank 1 differs")
    assert found["moment"].startswith(
        f"{start}optimizer/2.bias/exp_avg_sq on rank 1 differs from rank 0's by up to 1 (1 of 16 tensors differ)"
    )
    assert [each["said"].count("The ranks hold different weights") for each in outcomes] == [1, 0]


@pytest.mark.distributed
def test_shards_are_compared_between_their_replicas_only(outcomes: list[dict[str, str]]) -> None:
    found = outcomes[0]
    assert found["1 replicas"] == found["1 replicas, one bit"] == found["2 replicas"] == "completed 6"
    start = "The ranks hold different weights at iteration 4: 0.weight on rank 1 differs from rank 0's by up to "
    assert found["2 replicas, one bit"].startswith(start)
