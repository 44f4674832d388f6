"""What Throughput writes of FLOPs, and MemoryLogger of memory: as counted by hand, and as the process really holds."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.handlers import Checkpoint, MemoryLogger, Throughput
from tests.kit import saved
from tests.kit.processes import ranks
from tests.kit.tiny import linear, mse

EPOCH, EACH = Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED
MIB = 2**20


def numbers(count, size=4):
    return [(torch.randn(size, 3), torch.randn(size, 1)) for _ in range(count)]


def update_of(model=None, loss_fn=mse, **options):
    model = model or linear()
    return Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)


def by_hand(engine, batch, model=linear()):  # noqa: B008  # one for all
    mse(model, batch).backward()


def measuring(event=EPOCH, **options):
    trainer = Trainer(update_of())
    Throughput(**options).attach(trainer, event)
    return trainer


@pytest.mark.parametrize("narrow", [np.int32, lambda number: torch.tensor(number, dtype=torch.int32)])
def test_counts_of_narrow_integers_are_exact(narrow):
    trainer = measuring(samples_fn=lambda batch: narrow(1), tokens_fn=lambda batch: narrow(2**31 - 1))
    trainer.run(numbers(3))
    metrics = trainer.state.metrics
    assert metrics["throughput/tokens_per_s"] / metrics["throughput/samples_per_s"] == pytest.approx(
        2**31 - 1, rel=1e-12
    )


def at_rates(options, size=4):
    """What is written of FLOPs, for each sample in a second."""
    trainer = measuring(**options)
    trainer.run(numbers(3, size))
    metrics = trainer.state.metrics
    return [metrics[f"throughput/{name}"] / metrics["throughput/samples_per_s"] for name in ("tflops_per_s", "mfu")]


@pytest.mark.row("F6")
@pytest.mark.parametrize(("tokens_fn", "of_a_sample"), [(None, 7e12), (lambda batch: 5 * len(batch[0]), 35e12)])
def test_flops_are_those_of_tokens_or_samples_and_mfu_a_share_of_the_peak(tokens_fn, of_a_sample):
    found = at_rates({"tokens_fn": tokens_fn, "flops": 7e12, "peak_flops": 1e14})
    assert found == pytest.approx([of_a_sample / 1e12, of_a_sample / 1e14])


def test_on_two_ranks_flops_are_summed_and_the_peak_is_that_of_both():
    work = lambda rank: at_rates({"flops": 7e12, "peak_flops": 1e14}, 4 + rank)  # noqa: E731
    assert ranks(2, work) == [pytest.approx([7.0, 0.035])] * 2


def written(trainer, count, *event):
    """The memory values of each METRICS_READY of a run of so many iterations."""
    seen = []
    trainer.add_event_handler(
        TrainingEvents.METRICS_READY,
        lambda: seen.append({k: v for k, v in trainer.state.metrics.fresh.items() if k.startswith("memory/")}),
    )
    MemoryLogger().attach(trainer, *event)
    trainer.run(numbers(1) * count, max_epochs=1)
    return seen


def held_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB


@pytest.mark.parametrize("update", [update_of, lambda: by_hand])
def test_on_the_cpu_the_host_memory_is_written_and_nothing_else(update):
    seen = written(Trainer(update()), 5, EACH(every=2))
    assert [list(values) for values in seen] == [["memory/host_rss_mib"]] * 2
    assert seen[-1]["memory/host_rss_mib"] == pytest.approx(held_mib(), rel=0.05)


def test_it_is_written_every_50_iterations_and_saves_no_state(tmp_path):
    trainer = Trainer(update_of())
    Checkpoint(tmp_path).attach(trainer)
    assert len(written(trainer, 100)) == 2
    assert set(saved.parts(tmp_path)) == {"trainer", "data", "rng", "model", "optimizer", "checkpoint"}


def memory_on_a_rank(rank):
    ballast = torch.ones(96 * MIB * rank, dtype=torch.uint8)  # rank 1 holds more
    return written(Trainer(update_of()), 1, EACH), held_mib(), ballast.numel()


@pytest.mark.row("F7")
def test_on_two_ranks_the_worst_is_written_with_its_rank():
    (seen, held_0, _), (seen_1, held_1, _) = ranks(2, memory_on_a_rank)
    assert held_1 > held_0 + 40 and seen == seen_1
    assert seen[0]["memory/peak_rank"] == 1.0
    assert seen[0]["memory/host_rss_mib"] == pytest.approx(held_1, rel=0.1)


@pytest.mark.cuda
def test_on_cuda_the_peak_is_that_of_the_interval():
    sizes = iter([8, 64, 256, 8])

    def allocate_and_free(model, batch):
        torch.empty(next(sizes) * MIB, dtype=torch.uint8, device="cuda")
        return mse(model, batch)

    trainer = Trainer(update_of(linear().cuda(), allocate_and_free))
    trainer.run(numbers(1), max_epochs=1)  # cuBLAS takes its workspace for good
    torch.cuda.reset_peak_memory_stats()  # of what other tests have held
    seen = written(trainer, 3, EACH)
    peaks = [values["memory/peak_mib"] - values["memory/allocated_mib"] for values in seen]
    assert peaks == pytest.approx([64, 256, 8], abs=4)
    assert all(values["memory/reserved_mib"] >= 256 for values in seen[1:])
    totals = torch.cuda.memory_stats()  # of the process
    assert all(values.get("memory/retries", 0) == totals["num_alloc_retries"] for values in seen)
    assert all(values.get("memory/ooms", 0) == totals["num_ooms"] for values in seen)
