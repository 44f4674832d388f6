"""A captured update of a model in DDP: ranks have the same weights, whichever way each computes its gradients."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, loader
from ignite_engine.capture import NotCaptured, capture, trial
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


def unfrozen_within_the_run() -> dict[str, Tensor]:
    """A part of the model was frozen after DDP was made."""
    model = network()
    wrapped = DistributedDataParallel(model)
    model[0].requires_grad_(False)  # type: ignore[operator]
    trainer = Trainer(Update(wrapped, torch.optim.SGD(model.parameters(), lr=0.05), mse, capture=True), 2)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=1),
        lambda: model[0].requires_grad_(True),  # type: ignore[operator]
    )
    return trained(trainer, model)


def convolutions() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32, 1))


def images(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Batches of so many images, in whose layout a graph returns the gradients of convolutions."""
    return [
        (
            torch.randn(size, 3, 5, 5, generator=torch.Generator().manual_seed(size)).to(
                memory_format=torch.channels_last
            ),
            torch.ones(size, 1),
        )
        for size in sizes
    ]


def of_a_rank_without_graphs(kind: Any, data: Callable[[Sequence[int]], Any]) -> tuple[dict[str, Tensor], list[bool]]:
    """Rank 0 has a graph for each of its batches, the others for three shapes."""
    model, seen = kind(), list[bool]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    update = Update(DistributedDataParallel(model), optimizer, mse, capture=True, clip_norm=1e-2)
    trainer = Trainer(update)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: seen.append(update._capture._group_is_captured),  # type: ignore[union-attr]
    )
    trainer.run(data([4] * 24 if torch.distributed.get_rank() == 0 else range(2, 26)), max_epochs=1)
    return {name: value.clone() for name, value in model.state_dict().items()}, seen


def reads_a_value_of_five(model: nn.Module, batch: Any) -> Tensor:
    loss = mse(model, batch)
    return loss if len(batch[0]) != 5 or loss.item() > -1.0 else -loss


def given_up_and_resumed(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]:
    """``auto`` has decided by iteration 8; from iteration 10 on rank 1 trains the plain way."""
    size = 5 if torch.distributed.get_rank() == 1 else 4
    batches = [
        (torch.randn(each, 3, generator=torch.Generator().manual_seed(index)), torch.ones(each, 1))
        for index, each in enumerate([4] * 9 + [size] + [4] * 6)
    ]

    def made() -> tuple[Trainer, nn.Module, list[bool]]:
        model, seen = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)), list[bool]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        wrapped = DistributedDataParallel(model)
        trainer = Trainer(Update(wrapped, optimizer, reads_a_value_of_five, capture="auto"))
        captured = trainer.update._capture  # type: ignore[attr-defined]
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(captured._group_is_captured))
        return trainer, model, seen

    torch.manual_seed(0)
    whole, expected, _ = made()
    whole.run(batches, max_epochs=1)
    torch.manual_seed(0)
    stopped, _, _ = made()
    Checkpoint(folder).attach(stopped)
    stopped.run(batches, max_iters=12)
    resumed, model, seen = made()
    checkpoint = Checkpoint(folder)
    checkpoint.attach(resumed)
    checkpoint.resume()
    resumed.run(batches, max_epochs=1)
    return dict(expected.state_dict()), dict(model.state_dict()), seen


def with_a_hook_of_ddp() -> str:
    model = DistributedDataParallel(network())
    model.register_forward_hook(lambda module, inputs, output: output * 0.5)
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.05), mse, capture=True), 2)
    with pytest.raises(NotCaptured) as refused:
        trainer.run(data(), max_epochs=1)
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "MUST_GAIN", math.inf)
        results["given up"] = given_up_and_resumed(f"{folder}/given_up")
    results["refusals"] = refusals()
    results["unfrozen"] = unfrozen_within_the_run()
    results["without graphs"] = of_a_rank_without_graphs(convolutions, images)
    results["hook"] = with_a_hook_of_ddp()
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


@pytest.mark.slow
def test_what_is_frozen_after_ddp_was_made_is_averaged_when_it_is_trained_again(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["unfrozen"] for rank in ranks)
    assert [name for name in differing(first, second) if "running" not in name] == []
    assert not torch.equal(first["0.weight"], network().state_dict()["0.weight"])


@pytest.mark.slow
def test_a_rank_that_has_no_graph_for_a_batch_clips_by_the_same_norm(ranks: list[dict[str, Any]]) -> None:
    (first, captured), (second, other) = (rank["without graphs"] for rank in ranks)
    assert all(captured) and any(other) and not all(other)
    assert differing(first, second) == []


@pytest.mark.slow
def test_a_rank_that_has_given_up_goes_on_the_plain_way_when_resumed(ranks: list[dict[str, Any]]) -> None:
    for rank, is_captured in zip(ranks, (True, False), strict=True):
        expected, found, seen = rank["given up"]
        assert seen == [is_captured] * 4
        assert differing(expected, found) == []


@pytest.mark.slow
def test_hooks_of_ddp_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert "cannot be captured: DDP has hooks of its forward or backward." in ranks[0]["hook"]


def rows(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(size, 3), torch.ones(size, 1)) for size in sizes]


def without_graphs(rank: int, folder: str) -> None:
    torch.save(of_a_rank_without_graphs(network, rows), f"{folder}/{rank}.pt")


@pytest.mark.long  # compiles, on three ranks
def test_of_three_ranks_one_goes_on_the_plain_way_alone(tmp_path: Path) -> None:
    """Of three and more DDP arranges its buckets anew in a forward, for which ranks wait for each other."""
    on_ranks(3, without_graphs, tmp_path)

    (first, captured), *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(3))
    assert all(captured) and not any(all(seen) for _, seen in others)
    for state, _ in others:
        assert [name for name in differing(first, state) if "running" not in name] == []
