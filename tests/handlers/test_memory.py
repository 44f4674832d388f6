"""What MemoryLogger writes is what the process and the device really hold, the worst over the ranks."""

import resource
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update, devices
from ignite_engine.events import TrainingEvents
from ignite_engine.handlers.memory import MIB, MemoryLogger
from tests.ranks.forkserver import on_ranks

BALLAST_MIB = 96


def trainer_on(device, step=None):
    """A trainer of a tiny model whose loss function may do something besides."""
    model = nn.Linear(4, 1).to(device)

    def loss_fn(model, batch):
        if step is not None:
            step()
        loss = model(batch).pow(2).mean()
        return loss

    return Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn))


def published(trainer):
    """The memory values of each METRICS_READY to come."""
    seen = []

    def note(trainer):
        seen.append({k: v for k, v in trainer.state.metrics.fresh.items() if k.startswith("memory/")})

    trainer.add_event_handler(TrainingEvents.METRICS_READY, note)
    return seen


def batches(count):
    return [torch.ones(2, 4) for _ in range(count)]


def test_on_the_cpu_the_host_memory_is_written_and_nothing_else():
    trainer = trainer_on("cpu")
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(batches(5), max_epochs=1)
    assert [list(values) for values in seen] == [["memory/host_rss_mib"]] * 2
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert seen[-1]["memory/host_rss_mib"] == pytest.approx(pages * resource.getpagesize() / MIB, rel=0.05)


def test_it_is_before_the_loggers_of_the_same_iteration_and_saves_no_state():
    trainer = trainer_on("cpu")
    saved = set(trainer.registry.objects)
    seen = published(trainer)
    MemoryLogger().attach(trainer)
    trainer.run(batches(100), max_epochs=1)
    assert len(seen) == 2  # every 50 iterations
    assert set(trainer.registry.objects) == saved


def test_a_users_own_update_is_measured_too():
    trainer = Trainer(lambda engine, batch: None)
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run([0], max_epochs=1)
    assert seen[0]["memory/host_rss_mib"] > 0


def _one_of_two_ranks(rank, folder):
    ballast = torch.ones(BALLAST_MIB * MIB * rank, dtype=torch.uint8)  # rank 1 holds more
    trainer = trainer_on("cpu")
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(batches(1), max_epochs=1)
    own = torch.tensor(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB)
    torch.save({"seen": seen, "own": own, "held": ballast.numel()}, f"{folder}/{rank}.pt")


@pytest.mark.row("F7")
@pytest.mark.distributed
def test_on_two_ranks_the_worst_is_written_with_its_rank(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert second["own"] > first["own"] + 0.5 * BALLAST_MIB
    for values in (first["seen"][0], second["seen"][0]):
        assert values["memory/peak_rank"] == 1.0
        assert values["memory/host_rss_mib"] == pytest.approx(float(second["own"]), rel=0.1)
    assert first["seen"] == second["seen"]


@pytest.mark.cuda
def test_on_cuda_the_peak_is_that_of_the_interval():
    sizes = iter([64, 256, 8])

    def allocate_and_free():
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
    assert all(values.get("memory/retries", 0) == totals["num_alloc_retries"] for values in seen)
    assert all(values.get("memory/ooms", 0) == totals["num_ooms"] for values in seen)


def test_retries_are_written_once_there_were_any(monkeypatch):
    counts = iter([0, 2, 2])
    monkeypatch.setattr(devices, "has_memory_statistics", lambda kind: True)
    monkeypatch.setattr(devices, "memory_statistics", lambda device: {"num_alloc_retries": next(counts)})
    monkeypatch.setattr(devices, "reset_peak_memory", lambda device: None)
    trainer = trainer_on("cpu")
    seen = published(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(batches(3), max_epochs=1)
    assert [values.get("memory/retries") for values in seen] == [None, 2.0, 2.0]
    assert "memory/ooms" not in seen[-1]
