"""A captured update of a model in DDP: ranks have the same weights, whichever way each computes its gradients."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, loader
from ignite_engine.capture import NotCaptured, trial
from ignite_engine.handlers import Checkpoint
from tests.builders import Numbers, mse
from tests.ranks.forkserver import on_ranks

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile calls"),
    pytest.mark.distributed,
]


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def trainer_of(capture: bool | str, kind: Any = torch.optim.SGD) -> tuple[Trainer, nn.Module]:
    model = network()
    optimizer = kind(model.parameters(), lr=0.05)
    return Trainer(Update(DistributedDataParallel(model), optimizer, mse, capture=capture), 2), model


def data() -> Any:
    """Of each rank two groups of two micro-batches, the last of them short."""
    return loader(Numbers(28), 4, shuffle=True, seed=1)


def trained(trainer: Trainer, model: nn.Module, epochs: int = 2) -> dict[str, Tensor]:
    trainer.run(data(), max_epochs=epochs)
    return {name: value.clone() for name, value in model.state_dict().items()}


def reads_a_value_on_rank_1(model: nn.Module, batch: Any) -> Tensor:
    loss = mse(model, batch)
    if torch.distributed.get_rank() == 1:
        return loss if loss.item() > -1.0 else -loss
    return loss


def why_refused(model: nn.Module) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NotCaptured) as refused:
        Update(model, optimizer, mse, capture=True)
    assert Update(model, optimizer, mse, capture="auto")._capture.decision is False  # type: ignore[union-attr]
    return str(refused.value)


def refusals() -> list[str]:
    compressed = DistributedDataParallel(network())
    compressed.register_comm_hook(None, fp16_compress_hook)
    sparse = nn.Sequential(nn.Embedding(3, 2, sparse=True))
    return [
        why_refused(DistributedDataParallel(network(), find_unused_parameters=True)),
        why_refused(DistributedDataParallel(network(), static_graph=True)),
        why_refused(compressed),
        why_refused(DistributedDataParallel(sparse)),
        why_refused(nn.Sequential(DistributedDataParallel(network()), nn.Linear(1, 1))),
    ]


def stopped_and_resumed(folder: str) -> dict[str, Tensor]:
    stopped, _ = trainer_of(True)
    Checkpoint(folder, strict=True).attach(stopped)
    stopped.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: stopped.request_stop("a test"))
    stopped.run(data(), max_epochs=2)
    resumed, model = trainer_of(True)
    checkpoint = Checkpoint(folder)
    checkpoint.attach(resumed)
    checkpoint.resume()
    return trained(resumed, model)


def of_a_rank_that_gives_up() -> tuple[dict[str, Tensor], list[bool], bool | None]:
    """Captured on rank 0 alone, as long as ``auto`` tries."""
    trainer, model = trainer_of("auto", torch.optim.AdamW)  # whose step rounds otherwise when it is captured
    trainer.update.loss_fn = reads_a_value_on_rank_1  # type: ignore[attr-defined]
    captured = trainer.update._capture  # type: ignore[attr-defined]
    seen: list[bool] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(captured._group_is_captured))
    return trained(trainer, model, epochs=4), seen, captured.decision


def of_one_of_two_ranks(rank: int, folder: str) -> None:
    results: dict[str, Any] = {"plain": trained(*trainer_of(False)), "captured": trained(*trainer_of(True))}
    results["resumed"] = stopped_and_resumed(f"{folder}/run")
    trial.MEASURED, trial.WARM_UP = 2, 1
    results["gives up"] = of_a_rank_that_gives_up()
    results["refusals"] = refusals()
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, of_one_of_two_ranks, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def differing(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    return [name for name in some if not torch.equal(some[name], others[name])]


@pytest.mark.slow  # compiles, on two ranks
def test_the_weights_are_those_of_ddp_up_to_rounding_and_the_same_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    buffers = ["1.running_mean", "1.running_var"]  # each rank's own, until the next forward
    assert set(differing(first["captured"], second["captured"])) <= set(buffers)
    assert set(differing(first["plain"], first["captured"])) != set(), "nothing was captured"
    for rank in ranks:
        for name, value in rank["plain"].items():
            torch.testing.assert_close(rank["captured"][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert differing(rank["captured"], rank["resumed"]) == []


@pytest.mark.slow
def test_a_rank_that_gives_up_goes_on_with_its_peers_and_auto_decides_for_all(ranks: list[dict[str, Any]]) -> None:
    (first, captured, decision), (second, other, other_decision) = (rank["gives up"] for rank in ranks)
    assert any(captured) and not any(other)
    assert decision is other_decision is False
    assert [name for name in differing(first, second) if "running" not in name] == []


@pytest.mark.slow
def test_what_ddp_does_otherwise_than_averaging_is_refused(ranks: list[dict[str, Any]]) -> None:
    expected = (
        "DDP has find_unused_parameters",
        "DDP has static_graph",
        "DDP has a communication hook",
        "a gradient is sparse",
        "gradients are reduced over ranks by DistributedDataParallel, not by DDP around the whole model",
    )
    for reason, refusal in zip(expected, ranks[0]["refusals"], strict=True):
        assert f"cannot be captured: {reason}." in refusal
