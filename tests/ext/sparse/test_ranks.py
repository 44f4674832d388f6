"""Sparse tables and dense layers in DistributedDataParallel on two gloo ranks."""

import pytest
import torch
from ignite.engine import Engine, Events
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.handlers import Checkpoint
from ignite_engine.update.micro_batches import Group
from tests.kit.collectives import Collectives
from tests.kit.processes import ranks
from tests.sparse_and_dense import Net, Sized, batches, by_hand, loss_fn, optimizers_of, values

COUNTS = {"even": (6, 6), "uneven": (5, 3), "one rank is exhausted for an update": (6, 2)}
SCALER = {"init_scale": 256.0, "growth_interval": 3}
ALL = batches(12, 2)


def shares(counts):
    """Each rank's batches: the first ones of its half."""
    return [ALL[: counts[0]], ALL[6 : 6 + counts[1]]]


def trainer_of(model, **options):
    inner = getattr(model, "module", model)
    return Trainer(Update(model, optimizers_of(inner), loss_fn, clip_norm=0.5, **options), 2)


def in_ddp():
    return DistributedDataParallel(Net(), gradient_as_bucket_view=True)


def counted(trainer, data):
    """Run three epochs; the reductions of gradients so far after each backward."""
    seen = []
    with Collectives() as collectives:
        trainer.add_event_handler(
            TrainingEvents.BACKWARD_COMPLETED, lambda: seen.append(collectives.counts["all_reduce"])
        )
        trainer.run(data, max_epochs=3)
    return seen


def without_weight_on_rank_1(rank):
    """In every update both batches of rank 1 weigh nothing."""
    weights = iter([1.0, 1.0] * 3 if rank == 0 else [0.0, 0.0] * 3)
    model = in_ddp()
    trainer_of(model, weight_fn=lambda batch: next(weights)).run(Sized(shares((6, 6))[rank]))
    return values(model)


def resumed(rank, folder):
    def run(name, iterations):
        model = in_ddp()
        trainer = trainer_of(model)
        checkpoint = Checkpoint(folder / name)
        checkpoint.attach(trainer, Events.COMPLETED)
        checkpoint.resume()
        trainer.run(Sized(shares((5, 3))[rank]), max_iters=iterations)
        return values(model)

    whole = run("whole", 6)
    run("parts", 4)
    return [whole, run("parts", 6)]


def trained(rank, name):
    """The reductions after each backward, and the weights, of three epochs."""
    model = in_ddp()
    return counted(trainer_of(model), Sized(shares(COUNTS[name])[rank])), values(model)


def both_ways(rank, precision):
    model, written = in_ddp(), in_ddp()
    scaler = torch.amp.GradScaler("cpu", **SCALER) if precision == "fp16" else None
    options = {"grad_scaler": SCALER} if scaler else {}
    mine = shares((6, 6))[rank]
    trainer_of(model, precision=precision, **options).run(Sized(mine), max_epochs=2)
    by_hand(written, [mine[i : i + 2] for i in (0, 2, 4)], clip_norm=0.5, scaler=scaler, passes=2)
    return values(model), values(written)


def sharded(rank):
    with pytest.raises(ValueError, match="FSDP2"):
        trainer_of(fully_shard(Net()))


def on_one_process(groups, epochs):
    model = Net()
    update = Update(model, optimizers_of(model), loss_fn, clip_norm=0.5)
    Engine(update).run([Group(group) for group in groups], max_epochs=epochs)
    return values(model)


def assert_close(ours, others):
    for one, other in zip(ours, others, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", COUNTS)
def test_ranks_train_as_one_process_and_reduce_in_the_last_micro_batch_only(name):
    """The rows of a batch that a rank repeats with weight zero are not touched by it: SparseAdam would move them."""
    (counts, ours), (_, theirs) = ranks(2, trained, name)
    first, second = shares(COUNTS[name])
    groups = [first[i : i + 2] + second[i : i + 2] for i in range(0, max(COUNTS[name]), 2)]
    assert ours == theirs
    assert_close(ours, on_one_process(groups, 3))

    grown = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    # those of two tables and one bucket of dense ones; the last group of 5 micro-batches has one
    assert grown == [0, 3, 0, 3, *([3] if name == "uneven" else [0, 3])] * 3


def test_rows_of_a_batch_without_weight_are_not_touched():
    mine = shares((6, 6))[0]

    assert_close(ranks(2, without_weight_on_rank_1)[1], on_one_process([mine[i : i + 2] for i in (0, 2, 4)], 1))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_have_the_bits_of_the_loop_written_by_hand(precision):
    for ours, written in ranks(2, both_ways, precision):
        assert ours == written != values(Net())


def test_resumed_run_ends_with_the_same_bits(tmp_path):
    for whole, parts in ranks(2, resumed, tmp_path):
        assert whole == parts


def test_sharded_tables_are_refused():
    ranks(2, sharded)
