"""What MemoryLogger writes is what the process and the device really hold, the worst over the ranks."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update
from ignite_engine.engine.bus import handlers_of
from ignite_engine.events import TrainingEvents
from ignite_engine.handlers import host_memory
from ignite_engine.handlers.host_memory import MIB
from ignite_engine.handlers.memory import MemoryLogger
from tests.ranks.forkserver import on_ranks

BALLAST_MIB = 96


def trainer_on(device: str, step: Any = None) -> Trainer:
    """A trainer of a tiny model whose loss function may do something besides."""
    model = nn.Linear(4, 1).to(device)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if step is not None:
            step()
        loss: torch.Tensor = model(batch).pow(2).mean()
        return loss

    return Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn))


def published(trainer: Trainer) -> list[dict[str, float]]:
    """The memory values of each METRICS_READY to come."""
    seen: list[dict[str, float]] = []

    def note(trainer: Trainer) -> None:
        seen.append({k: v for k, v in trainer.state.metrics.fresh.items() if k.startswith("memory/")})

    trainer.add_event_handler(TrainingEvents.METRICS_READY, note)
    return seen


def batches(count: int) -> list[torch.Tensor]:
    return [torch.ones(2, 4) for _ in range(count)]


def test_on_the_cpu_the_host_memory_is_written_and_nothing_else() -> None:
    trainer = trainer_on("cpu")
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(batches(5), max_epochs=1)
    phases = ["after_backward", "after_forward", "after_optimizer"]
    names = [f"memory/host_{name}_mib" for name in (*phases, "headroom", "limit", "peak", "rss")]
    assert [sorted(values) for values in seen] == [names] * 2
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert seen[-1]["memory/host_rss_mib"] == pytest.approx(pages * resource.getpagesize() / MIB, rel=0.05)


def test_memory_that_was_given_back_stays_in_the_peak() -> None:
    # the peak of the process so far is exceeded for certain, whatever ran before in it
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    headroom = int(status["VmHWM"].split()[0]) / 1024 - int(status["VmRSS"].split()[0]) / 1024
    ballast = headroom + BALLAST_MIB

    def allocate_and_free() -> None:
        torch.ones(int(ballast * MIB), dtype=torch.uint8)

    trainer = trainer_on("cpu", allocate_and_free)
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(batches(1), max_epochs=1)
    assert seen[0]["memory/host_peak_mib"] > seen[0]["memory/host_rss_mib"] + 0.9 * ballast - headroom


def test_it_is_before_the_loggers_of_the_same_iteration_and_saves_no_state() -> None:
    trainer = trainer_on("cpu")
    saved = set(trainer.registry.objects)
    seen = published(trainer)
    MemoryLogger().attach(trainer)
    trainer.run(batches(100), max_epochs=1)
    assert len(seen) == 2  # every 50 iterations
    assert set(trainer.registry.objects) == saved


def test_a_users_own_update_is_measured_too() -> None:
    trainer = Trainer(lambda engine, batch: None)
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run([0], max_epochs=1)
    assert seen[0]["memory/host_rss_mib"] > 0


class Activations(torch.autograd.Function):
    """Holds ballast from its forward to its backward."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(torch.ones(BALLAST_MIB * MIB, dtype=torch.uint8))
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient


class HoldsMore(torch.optim.SGD):
    """Makes a state of the size of the ballast in its first step."""

    held: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        if self.held is None:
            self.held = torch.ones(BALLAST_MIB * MIB, dtype=torch.uint8)
        return super().step(closure)


def test_what_is_in_use_after_each_phase_is_that_of_the_first_iteration_of_an_interval() -> None:
    model = nn.Linear(4, 1)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = Activations.apply(model(batch)).pow(2).mean()  # type: ignore[no-untyped-call]
        return loss

    trainer = Trainer(Update(model, HoldsMore(model.parameters(), lr=0.1), loss_fn), 2)
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED(every=3))
    listening: list[int] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: listening.append(len(handlers_of(trainer, TrainingEvents.BACKWARD_COMPLETED))),
    )
    trainer.run(batches(12), max_epochs=1)
    first, second = seen
    assert first["memory/host_after_forward_mib"] - first["memory/host_after_backward_mib"] == pytest.approx(
        BALLAST_MIB, abs=8
    )
    assert first["memory/host_after_optimizer_mib"] - first["memory/host_after_backward_mib"] == pytest.approx(
        BALLAST_MIB, abs=8
    )
    assert second["memory/host_after_optimizer_mib"] - second["memory/host_after_backward_mib"] == pytest.approx(
        0, abs=8
    )
    assert listening == [1, 0, 1, 1, 0, 1]  # it is the first again behind each event


def test_little_headroom_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in {"max": 100 * MIB, "current": 96 * MIB, "stat": "inactive_file 0"}.items():
        (tmp_path / f"memory.{name}").write_text(str(text))
    monkeypatch.setattr("ignite_engine.handlers.memory.memory_groups", lambda: [tmp_path])
    trainer = trainer_on("cpu")
    MemoryLogger(warn_below=0.03).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(batches(2), max_epochs=1)
    assert not caplog.records
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(batches(3), max_epochs=2)
    assert caplog.text.count("4 MiB of host memory are left of the 100 MiB of the control group") == 1
    assert trainer.state.metrics["memory/host_limit_mib"] == 100
    assert trainer.state.metrics["memory/host_headroom_mib"] == 4
    with pytest.raises(ValueError, match="warn_below must be a share of the limit from 0 to 1, got 5"):
        MemoryLogger(warn_below=5)


@pytest.mark.parametrize("where", ["a folder", "none", "one that cannot be written"])
def test_out_of_memory_names_the_shapes_and_writes_a_file(where: str, tmp_path: Path) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    (tmp_path / "file").write_text("")
    directory = {"a folder": tmp_path / "run", "none": None, "one that cannot be written": tmp_path / "file"}[where]
    trainer = trainer_on("cpu", fail)
    MemoryLogger(directory).attach(trainer)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.run(batches(3), max_epochs=1)
    notes = "\n".join(caught.value.__notes__)
    assert "The batch of iteration 1 has the shapes Tensor [2, 4] float32" in notes
    path = tmp_path / "run" / "out_of_memory_rank_0.txt"
    assert (str(path) in notes) == path.exists() == (where == "a folder")
    if path.exists():
        text = path.read_text()
        assert (
            "Tried to allocate 2.00 GiB" in text
            and "iteration 1, epoch 1, rank 0, cpu" in text
            and "Tensor [2, 4]" in text
        )
    assert not handlers_of(trainer, TrainingEvents.BACKWARD_COMPLETED)


def test_another_error_leaves_no_file(tmp_path: Path) -> None:
    trainer = trainer_on("cpu", lambda: 1 / 0)
    MemoryLogger(tmp_path).attach(trainer)
    with pytest.raises(ZeroDivisionError):
        trainer.run(batches(3), max_epochs=1)
    assert list(tmp_path.iterdir()) == []


def test_it_works_without_proc_and_without_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_STATUS", tmp_path / "missing")
    monkeypatch.setattr("ignite_engine.handlers.memory.memory_groups", lambda: [])
    trainer = trainer_on("cpu")
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(batches(1), max_epochs=1)
    assert seen[0]["memory/host_peak_mib"] >= seen[0]["memory/host_rss_mib"] > 0
    assert seen[0]["memory/host_limit_mib"] > seen[0]["memory/host_headroom_mib"] > 0


def _one_of_two_ranks(rank: int, folder: str) -> None:
    ballast = torch.ones(BALLAST_MIB * MIB * rank, dtype=torch.uint8)  # rank 1 holds more
    trainer = trainer_on("cpu")
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(batches(1), max_epochs=1)
    own = torch.tensor(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB)
    torch.save({"seen": seen, "own": own, "held": ballast.numel()}, f"{folder}/{rank}.pt")


@pytest.mark.distributed
def test_on_two_ranks_the_worst_is_written_with_its_rank(tmp_path: Path) -> None:
    on_ranks(2, _one_of_two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert second["own"] > first["own"] + 0.5 * BALLAST_MIB
    for values in (first["seen"][0], second["seen"][0]):
        assert values["memory/peak_rank"] == 1.0
        assert values["memory/host_rss_mib"] == pytest.approx(float(second["own"]), rel=0.1)
    assert first["seen"] == second["seen"]
    assert first["seen"][0]["memory/host_after_forward_mib"] == pytest.approx(float(second["own"]), rel=0.1)


@pytest.mark.cuda
def test_on_cuda_the_peak_is_that_of_the_interval() -> None:
    sizes = iter([64, 256, 8])

    def allocate_and_free() -> None:
        torch.empty(next(sizes) * MIB, dtype=torch.uint8, device="cuda")

    trainer_on("cuda").run(batches(1), max_epochs=1)  # cuBLAS takes its workspace for good
    trainer = trainer_on("cuda", allocate_and_free)
    seen = published(trainer)
    torch.cuda.reset_peak_memory_stats()  # of what other tests have held
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(batches(3), max_epochs=1)
    peaks = [values["memory/peak_mib"] - values["memory/allocated_mib"] for values in seen]
    assert peaks == pytest.approx([64, 256, 8], abs=4)
    assert all(values["memory/reserved_mib"] >= 256 for values in seen[1:])
    totals = torch.cuda.memory_stats()  # of the process
    assert all(values["memory/retries"] == totals["num_alloc_retries"] for values in seen)
    assert all(values["memory/ooms"] == totals["num_ooms"] for values in seen)


@pytest.mark.cuda
def test_on_cuda_phases_are_what_tensors_take_and_the_peak_is_kept() -> None:
    held: list[torch.Tensor] = []

    class Keeps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            held.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
            return super().step(closure)

    model = nn.Linear(4, 1).cuda()
    wide = nn.Linear(4, 2**20, bias=False).cuda()  # 4 MiB for each sample of its output, until backward

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = wide(batch).tanh().mean() + model(batch).mean()
        return loss

    trainer = Trainer(Update(model, Keeps(model.parameters(), lr=0.1), loss_fn))
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    # more activations than the 16 MiB of the gradient, which the first backward leaves
    trainer.run([torch.ones(16, 4), torch.ones(16, 4)], max_epochs=1)
    for values in seen:
        assert values["memory/after_forward_mib"] > values["memory/after_backward_mib"]
        assert values["memory/after_optimizer_mib"] - values["memory/after_backward_mib"] == pytest.approx(64, abs=4)
        assert values["memory/peak_mib"] >= values["memory/after_optimizer_mib"]


@pytest.mark.cuda
def test_on_cuda_out_of_memory_writes_torchs_summary(tmp_path: Path) -> None:
    def too_much() -> None:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    trainer = trainer_on("cuda", too_much)
    MemoryLogger(tmp_path).attach(trainer)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.run([torch.ones(1, 4)], max_epochs=1)  # one sample is not split
    assert "PyTorch CUDA memory summary" in (tmp_path / "out_of_memory_rank_0.txt").read_text()
