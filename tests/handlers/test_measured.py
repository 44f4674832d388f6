"""What Throughput writes of FLOPs, and MemoryLogger of memory: as counted by hand, and as the process really holds."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update, Updates
from ignite_engine.handlers import Checkpoint, MemoryLogger, Throughput
from tests.kit import saved
from tests.kit.processes import ranks, start_ranks
from tests.kit.sharded import in_layout
from tests.kit.tiny import linear, mse, weights

OF_A_SAMPLE = 2 * (2 * 3 * 4 + 3 * 4 * 1)  # of linear(): its inputs need no gradient
EPOCH, EACH = Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED
MIB = 2**20


def numbers(count, size=4):
    return [(torch.randn(size, 3), torch.randn(size, 1)) for _ in range(count)]


def update_of(model=None, loss_fn=mse, **options):
    model = model or linear()
    return Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)


def counting(update=None, event=EPOCH, **options):
    trainer = Trainer(update or update_of())
    Throughput(**{"flops": True, **options}).attach(trainer, event)
    return trainer


def flops_of(trainer, unit="samples"):
    """Of a sample, as the metrics say."""
    metrics = trainer.state.metrics
    return 1e12 * metrics["throughput/tflops_per_s"] / metrics[f"throughput/{unit}_per_s"]


def by_hand(engine, batch, model=linear()):  # noqa: B008  # one for all
    mse(model, batch).backward()


def in_turn():
    model = linear()
    return Updates({name: update_of(model) for name in ("one", "other")})


@pytest.mark.row("F6")
@pytest.mark.parametrize(
    ("update", "factor"), [(update_of, 1), (lambda: by_hand, 1), (in_turn, 2)], ids=["an Update", "one's own", "two"]
)
def test_flops_are_those_by_hand_and_then_nothing_listens(update, factor):
    trainer, bare = counting(update()), counting(update(), flops=False)
    for each in (trainer, bare):
        each.run(numbers(6))
    assert flops_of(trainer) == pytest.approx(factor * OF_A_SAMPLE) and "throughput/mfu" not in trainer.state.metrics
    assert trainer.describe().count("Throughput") == bare.describe().count("Throughput")


def test_mfu_and_flops_of_a_token_and_no_bit_of_the_run_is_another():
    def trained(**options):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(8, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 8)
        )

        def loss_fn(model, batch):
            return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

        update = Update(model, torch.optim.AdamW(model.parameters()), loss_fn, precision="bf16")
        trainer = Trainer(update, 2)
        Throughput(torch.numel, **options).attach(trainer, EPOCH)
        generator = torch.Generator().manual_seed(1)
        sizes = (2, 2, 1, 2, 2)  # the counted iteration has other micro-batches than the others
        trainer.run([torch.randint(8, (size, 10), generator=generator) for size in sizes], max_epochs=2)
        return trainer

    trainer, bare = trained(flops=True, peak_flops=1e12), trained()
    matrices = 4 * 16 * 16 + 2 * 16 * 32 + 16 * 8  # attention, two layers, the head: forward and backward are 6 of each
    assert 0.9 * 6 * matrices < flops_of(trainer, "tokens") < 1.3 * 6 * matrices
    assert trainer.state.metrics["throughput/mfu"] == pytest.approx(trainer.state.metrics["throughput/tflops_per_s"])
    assert torch.equal(weights(trainer), weights(bare))


def test_iterations_that_are_skipped_are_not_the_counted_one():
    trainer = counting(update_of(weight_fn=lambda batch: float(len(batch[0]))))
    trainer.run([*numbers(1), *numbers(1, size=0), *numbers(2)])
    assert flops_of(trainer) == pytest.approx(OF_A_SAMPLE)


def test_a_run_that_is_paused_or_fails_in_the_counted_iteration_counts_in_a_later_one():
    fails = [True]

    def loss_fn(model, batch):
        if trainer.state.iteration == 3 and fails.pop(0):
            raise ZeroDivisionError
        return mse(model, batch)

    trainer = counting(update_of(loss_fn=loss_fn))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), trainer.interrupt)
    trainer.run(numbers(6))
    assert trainer.state.iteration == 2
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers(6))
    fails.append(False)
    for _ in range(2):  # it is paused again
        trainer.run(numbers(6))
    assert flops_of(trainer) == pytest.approx(OF_A_SAMPLE)


@pytest.mark.parametrize("narrow", [np.int32, lambda number: torch.tensor(number, dtype=torch.int32)])
def test_counts_of_narrow_integers_are_exact(narrow):
    trainer = counting(flops=False, samples_fn=lambda batch: narrow(1), tokens_fn=lambda batch: narrow(2**31 - 1))
    trainer.run(numbers(3))
    metrics = trainer.state.metrics
    assert metrics["throughput/tokens_per_s"] / metrics["throughput/samples_per_s"] == pytest.approx(
        2**31 - 1, rel=1e-12
    )


def test_ones_own_function_is_taken_for_each_micro_batch():
    trainer = counting(flops=lambda batch: 7.0 * len(batch[0]), peak_flops=1e9)
    trainer.run(numbers(3))
    assert flops_of(trainer) == pytest.approx(7.0)
    mfu = trainer.state.metrics["throughput/mfu"]
    assert mfu == pytest.approx(7 * trainer.state.metrics["throughput/samples_per_s"] / 1e9)


def on_a_rank(rank):
    found = {}
    for layout in ("ddp", "fsdp", "tp"):
        values = []
        for flops in (False, True):
            model, _ = in_layout(layout)
            trainer = counting(update_of(model), flops=flops, peak_flops=1e9)
            torch.manual_seed(0 if layout == "tp" else rank)
            size = 4 if layout == "tp" else 4 + rank
            trainer.run(numbers(4, size))
            whole = [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in model.parameters()]
            values.append([each.tolist() for each in whole])
        metrics = trainer.state.metrics
        counted = flops_of(trainer) if "throughput/tflops_per_s" in metrics else None
        mfu = metrics.get("throughput/mfu", 0.0) * 1e9 / metrics["throughput/samples_per_s"]
        found[layout] = values[0] == values[1], counted, mfu
    return found


def test_on_two_ranks_flops_are_summed_and_the_peak_is_that_of_both():
    of_net = 2 * 3 * 6 * 2 + 3 * 2 * (6 * 5 + 5 * 1)  # of the kit's model: its inputs need no gradient
    for rank in start_ranks(2, on_a_rank):
        found = rank.answer()
        for layout in ("ddp", "fsdp"):
            assert found[layout] == (True, pytest.approx(of_net), pytest.approx(of_net / 2)), layout
        assert found["tp"] == (True, None, 0.0), "ranks that share a model: it is not known which part is whose"


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
