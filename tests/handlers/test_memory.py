"""What MemoryLogger writes is what the process and the device really hold, the worst over the ranks."""

import resource
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.handlers import Checkpoint, MemoryLogger
from tests.kit import saved
from tests.kit.processes import ranks

MIB = 2**20
EACH = Events.ITERATION_COMPLETED


def update_on(device, step=lambda: None):
    """Of a tiny model whose loss function may do something besides."""
    model = nn.Linear(4, 1).to(device)

    def loss_fn(model, batch):
        step()
        return model(batch).pow(2).mean()

    return Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)


def written(trainer, count, *event):
    """The memory values of each METRICS_READY of a run of so many iterations."""
    seen = []
    trainer.add_event_handler(
        TrainingEvents.METRICS_READY,
        lambda: seen.append({k: v for k, v in trainer.state.metrics.fresh.items() if k.startswith("memory/")}),
    )
    MemoryLogger().attach(trainer, *event)
    trainer.run([torch.ones(2, 4)] * count, max_epochs=1)
    return seen


def held_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB


@pytest.mark.parametrize("update", [lambda: update_on("cpu"), lambda: lambda engine, batch: None])
def test_on_the_cpu_the_host_memory_is_written_and_nothing_else(update):
    seen = written(Trainer(update()), 5, EACH(every=2))
    assert [list(values) for values in seen] == [["memory/host_rss_mib"]] * 2
    assert seen[-1]["memory/host_rss_mib"] == pytest.approx(held_mib(), rel=0.05)


def test_it_is_written_every_50_iterations_and_saves_no_state(tmp_path):
    trainer = Trainer(update_on("cpu"))
    Checkpoint(tmp_path).attach(trainer)
    assert len(written(trainer, 100)) == 2
    assert set(saved.parts(tmp_path)) == {"trainer", "data", "rng", "model", "optimizer", "checkpoint"}


def on_a_rank(rank):
    ballast = torch.ones(96 * MIB * rank, dtype=torch.uint8)  # rank 1 holds more
    return written(Trainer(update_on("cpu")), 1, EACH), held_mib(), ballast.numel()


@pytest.mark.row("F7")
def test_on_two_ranks_the_worst_is_written_with_its_rank():
    (seen, held_0, _), (seen_1, held_1, _) = ranks(2, on_a_rank)
    assert held_1 > held_0 + 40 and seen == seen_1
    assert seen[0]["memory/peak_rank"] == 1.0
    assert seen[0]["memory/host_rss_mib"] == pytest.approx(held_1, rel=0.1)


@pytest.mark.cuda
def test_on_cuda_the_peak_is_that_of_the_interval():
    sizes = iter([8, 64, 256, 8])

    def allocate_and_free():
        torch.empty(next(sizes) * MIB, dtype=torch.uint8, device="cuda")

    trainer = Trainer(update_on("cuda", allocate_and_free))
    trainer.run([torch.ones(2, 4)], max_epochs=1)  # cuBLAS takes its workspace for good
    torch.cuda.reset_peak_memory_stats()  # of what other tests have held
    seen = written(trainer, 3, EACH)
    peaks = [values["memory/peak_mib"] - values["memory/allocated_mib"] for values in seen]
    assert peaks == pytest.approx([64, 256, 8], abs=4)
    assert all(values["memory/reserved_mib"] >= 256 for values in seen[1:])
    totals = torch.cuda.memory_stats()  # of the process
    assert all(values.get("memory/retries", 0) == totals["num_alloc_retries"] for values in seen)
    assert all(values.get("memory/ooms", 0) == totals["num_ooms"] for values in seen)
