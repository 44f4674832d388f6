"""A micro-batch that does not fit into memory is split on one process; on several ranks all is said in one line."""

from __future__ import annotations

import logging
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, TrainingEvents, Update, loader
from ignite_engine.handlers import Checkpoint
from ignite_engine.step import out_of_memory
from ignite_engine.step.out_of_memory import samples_of, split
from tests.builders import Numbers, linear, mse, one
from tests.ranks.forkserver import on_ranks


class Memory:
    """A loss function whose memory holds so many samples; ``late``: it is used up in backward."""

    def __init__(self, samples: int, *, late: bool = False) -> None:
        self.samples, self.late = samples, late
        self.sizes: list[int] = []
        self.failures = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = mse(model, batch)
        count = len(batch[0])
        self.sizes.append(count)
        if count > self.samples:
            self.failures += 1
            if not self.late:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has more to say.")
            loss.register_hook(self._fail_soon)
            # the first layer's gradient comes last: some are accumulated by then
            next(model.parameters()).register_hook(self._fail)
        return loss

    def _fail_soon(self, gradient: Tensor) -> None:
        self._failing = True

    def _fail(self, gradient: Tensor) -> None:
        if getattr(self, "_failing", False):
            self._failing = False
            raise torch.OutOfMemoryError("CUDA out of memory.")


def trained(
    loss_fn: Any, batch_size: int = 8, steps: int | None = None, model: nn.Module | None = None, **options: Any
) -> tuple[Tensor, Any]:
    model = linear(dtype=torch.float64) if model is None else model
    update = Update(model, torch.optim.Adam(model.parameters(), lr=0.05), loss_fn, **options)
    state = Trainer(update, steps).run(loader(Numbers(48, dtype=torch.float64), batch_size))
    return one(model).clone(), state


@pytest.fixture(autouse=True)
def may_happen_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "NEVER_ON", frozenset())


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [each.getMessage() for each in caplog.records if "memory" in each.getMessage()]


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("fits", [5, 3, 1])
def test_split_step_is_the_whole_step(fits: int, steps: int | None, late: bool, said: Callable[[], list[str]]) -> None:
    memory = Memory(fits, late=late)
    weights, state = trained(memory, steps=steps, clip_norm=0.5)
    reference, whole = trained(mse, steps=steps, clip_norm=0.5)

    torch.testing.assert_close(weights, reference, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state.output, whole.output, rtol=1e-12, atol=1e-13)
    limit = {5: 4, 3: 2, 1: 1}[fits]
    assert memory.failures == len(said()) == {5: 1, 3: 2, 1: 3}[fits], "it is remembered"
    assert state.micro_batch_limit == limit and state.micro_batches == 48 // limit
    assert (state.optimizer_steps, state.skipped_steps) == (whole.optimizer_steps, 0)
    assert said()[0] == (
        "Out of memory in iteration 1 with a micro-batch of shapes (8, 3), (8, 1): the step is done again, and "
        "micro-batches of more than 4 samples are split from now on. A smaller batch_size with more "
        "accumulation_steps costs no second attempt."
    )


@pytest.mark.slow
def test_micro_batches_before_the_failed_one_count_once() -> None:
    data = Numbers(20, dtype=torch.float64)
    batches = [
        (data.inputs[start:end], data.targets[start:end]) for start, end in ((0, 2), (2, 10), (10, 12), (12, 20))
    ]
    ends = []
    for loss_fn in (Memory(5, late=True), mse):
        model = linear(dtype=torch.float64)
        trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn), 2)
        ends.append((one(model), trainer.run(batches).micro_batches))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-12, atol=1e-13)
    assert (ends[0][1], ends[1][1]) == (6, 4)


@pytest.mark.slow
def test_parts_weigh_what_weight_fn_says() -> None:
    def positive(batch: Any) -> int:
        return int((batch[1] > 0).sum())

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return (model(inputs) - targets).square()[targets > 0].mean()

    def limited(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("full")
        return loss_fn(model, batch)

    for steps in (None, 3):
        weights, _ = trained(limited, steps=steps, weight_fn=positive)
        reference, _ = trained(loss_fn, steps=steps, weight_fn=positive)
        torch.testing.assert_close(weights, reference, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_random_numbers_are_rewound_and_the_split_is_resumed(tmp_path: Path) -> None:
    """The failed attempt draws nothing: the run is that of a loader whose batches were as small from the start."""
    split_weights, _ = trained(Memory(4), 8, model=linear(dtype=torch.float64, dropout=True))  # which seeds
    grouped_weights, _ = trained(mse, 4, 2, model=linear(dtype=torch.float64, dropout=True))
    torch.testing.assert_close(split_weights, grouped_weights, rtol=1e-12, atol=1e-13)

    def run(limit: int, folder: Path) -> tuple[Tensor, Memory]:
        model, memory = linear(dtype=torch.float64, dropout=True), Memory(4)
        torch.manual_seed(1)
        trainer = Trainer(Update(model, torch.optim.Adam(model.parameters(), lr=0.05), memory))
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(loader(Numbers(48, dtype=torch.float64), 8), max_iters=limit)
        return one(model), memory

    whole, _ = run(6, tmp_path / "whole")
    run(3, tmp_path / "resumed")
    resumed, memory = run(6, tmp_path / "resumed")
    assert torch.equal(resumed, whole) and memory.sizes == [4] * 6, "the resumed run need not fail again"


@pytest.mark.slow
def test_batchnorm_is_named_and_a_second_run_begins_anew(said: Callable[[], list[str]]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    memory = Memory(4)
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.05), memory))
    for _ in range(2):
        trainer.run(loader(Numbers(16, dtype=torch.float64), 8))
    assert memory.sizes == [8, 4, 4, 4, 4] * 2
    assert [", each part with its own statistics in BatchNorm." in line for line in said()] == [True, True]


def test_in_a_plain_engine_too() -> None:
    model = linear()
    memory = Memory(2)
    engine = Engine(Update(model, torch.optim.SGD(model.parameters(), lr=0.05), memory))
    engine.run(loader(Numbers(8), 4))
    assert memory.sizes == [4, 2, 2, 2, 2]


def test_events_see_the_parts() -> None:
    trainer = Trainer(Update(model := linear(), torch.optim.SGD(model.parameters(), lr=0.05), Memory(2)), 2)
    seen: list[int] = []
    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED, lambda: seen.append(trainer.state.micro_batches))
    trainer.run(loader(Numbers(8), 4))
    assert seen == [1, 2, 3, 4]


Named = namedtuple("Named", "inputs names")


def test_nested_batches_are_split_and_the_rest_is_the_same_in_each_part() -> None:
    batch = {
        "pair": [torch.arange(5), Named(torch.arange(10).view(5, 2), ["a", "b", "c", "d", "e"])],
        "scale": torch.tensor(3.0),
        "word": "all",
    }
    assert samples_of(batch) == 5
    parts, scales = split([batch], [1.0], 2, None)
    assert scales == [0.2, 0.4, 0.4]
    assert [part["pair"][0].tolist() for part in parts] == [[0], [1, 2], [3, 4]]
    assert [part["pair"][1].names for part in parts] == [["a"], ["b", "c"], ["d", "e"]]
    assert all(type(part["pair"][1]) is Named and part["word"] == "all" for part in parts)
    assert all(part["scale"] is batch["scale"] for part in parts)


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ([torch.ones(1, 3), torch.ones(1, 1)], r"shapes \(1, 3\), \(1, 1\), and one sample cannot be split"),
        ([torch.ones(4, 3), torch.ones(2, 1)], "and it cannot be split, as its tensors have no dimension 0 of one"),
        ("text", r"shapes none \(str\), and it cannot be split"),
    ],
)
def test_what_cannot_be_split_is_one_sentence_with_its_shapes(batch: Any, why: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")

    model = linear()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn))
    with pytest.raises(
        torch.OutOfMemoryError, match=f"Out of memory in iteration 1 with a micro-batch of .*{why}"
    ) as raised:
        trainer.run([batch])
    assert str(raised.value).endswith(
        "accumulation_steps. OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    )
    assert trainer.state.status == "failed"


def test_rank_invariant_micro_batches_stay_whole() -> None:
    update = Update(model := linear(), torch.optim.SGD(model.parameters(), lr=0.05), Memory(2), rank_invariant=True)
    with pytest.raises(torch.OutOfMemoryError, match=r"in iteration 1 .* under DDP, FSDP2 and rank_invariant none is"):
        Trainer(update, global_micro_batches=2).run(loader(Numbers(16), 4))


def _one_of_two_ranks(rank: int, folder: str) -> None:
    out_of_memory.NEVER_ON = frozenset()  # type: ignore[misc]  # as on CUDA
    logging.disable(logging.WARNING)
    model = DistributedDataParallel(linear())
    calls: list[int] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        if len(calls) == 3:
            raise torch.OutOfMemoryError("full")
        return mse(model, batch)

    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn))
    error = ""
    try:
        trainer.run(loader(Numbers(16), 2))
    except torch.OutOfMemoryError as raised:
        error = str(raised)
    torch.save((error, calls), f"{folder}/{rank}.pt")


@pytest.mark.distributed
def test_on_two_ranks_the_error_names_rank_and_iteration(tmp_path: Path) -> None:
    on_ranks(2, _one_of_two_ranks, tmp_path)
    for rank in range(2):
        error, calls = torch.load(tmp_path / f"{rank}.pt")
        assert calls == [2, 2, 2]
        assert error.startswith(
            f"Out of memory on rank {rank} in iteration 3 with a micro-batch of shapes (2, 3), (2, 1), and on several "
            "ranks none is split: use a smaller batch_size"
        )


@pytest.mark.slow
def test_listener_that_counts_iterations_sees_each_once() -> None:
    trainer = Trainer(Update(model := linear(), torch.optim.SGD(model.parameters(), lr=0.05), Memory(2)))
    seen: list[int] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(trainer.state.iteration))
    trainer.run(loader(Numbers(12), 4))
    assert seen == [1, 2, 3]
