"""Updates on two gloo ranks: what is reduced when, and what one of them has all the others act on."""

import logging
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Engine, Events
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Subset

from ignite_engine import Trainer, TrainingEvents, Update, loader
from ignite_engine.errors import NotFinite
from ignite_engine.schedules import warmup_linear
from ignite_engine.update.micro_batches import gradient_sync
from tests.kit.collectives import Collectives
from tests.kit.processes import ranks
from tests.kit.tiny import Numbers, linear, mse, one
from tests.update import test_rollback as rollback
from tests.update.test_non_finite import INFINITE_GRADIENTS, NO_GRADIENTS, Planted, journal, trainer_with


def lines_of(rank, folder):
    """What this rank logs from now on, of iterations."""
    path = Path(folder, f"{rank}.txt")
    handler = logging.FileHandler(path)
    logging.getLogger("ignite_engine").addHandler(handler)
    return lambda: [line for line in path.read_text().splitlines() if "iteration" in line]


# -- which backward reduces -------------------------------------------------------------------------------------------


def batches_of(rank, count=6):
    data = Numbers(4 * count)
    return [(data.inputs[at : at + 2], data.targets[at : at + 2]) for at in range(2 * rank, 4 * count, 4)]


def sharded(model):
    fully_shard(model[0])
    return fully_shard(model)


def reductions(rank, wrap, by_hand):
    """After each backward of two groups of three; and the weights."""
    model, seen = wrap(linear()), []
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), batches_of(rank)
    with Collectives() as collectives:

        def look():
            seen.append(collectives.counts["all_reduce"] + collectives.counts["reduce_scatter"])

        if by_hand:
            for group in (batches[:3], batches[3:]):
                optimizer.zero_grad()
                for index, batch in enumerate(group):
                    with gradient_sync(model, last=index == 2):
                        (mse(model, batch) / 3).backward()
                    look()
                optimizer.step()
        else:
            trainer = Trainer(Update(model, optimizer, mse), 3)
            trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED, look)
            trainer.run(batches, max_epochs=1)
    return seen, [getattr(each, "full_tensor", lambda each=each: each)().tolist() for each in model.parameters()]


@pytest.mark.parametrize("wrap", [DistributedDataParallel, sharded])
def test_only_the_last_backward_of_a_group_reduces_as_in_a_loop_with_gradient_sync(wrap):
    for found, written in zip(ranks(2, reductions, wrap, False), ranks(2, reductions, wrap, True), strict=True):
        assert found == written
        seen = found[0]
        assert seen[0] == seen[1] == 0 < seen[2] == seen[3] == seen[4] and seen[5] == 2 * seen[2]


def restored(rank):
    model = DistributedDataParallel(linear())
    with pytest.raises(KeyError), gradient_sync(model, last=False):
        raise KeyError
    mse(model, batches_of(rank)[0]).backward()
    return [parameter.grad.tolist() for parameter in model.parameters()]


def test_an_error_within_gradient_sync_restores_the_reduction():
    first, second = ranks(2, restored)
    assert first == second


def out_of_data(rank):
    """Rank 1 has data for the first of two iterations only, and repeats a batch for its peer in the second."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model, seen = DistributedDataParallel(inner, broadcast_buffers=False), []
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse), 2)

    def look():
        buffers = [buffer.tolist() for buffer in model.buffers()]
        seen.append((torch.get_rng_state().tolist(), buffers, one(model).tolist()))

    trainer.add_event_handler(Events.ITERATION_COMPLETED, look)
    trainer.run(batches_of(rank, 4)[: 4 - 2 * rank], max_epochs=1)
    return seen


def test_a_forward_that_only_the_peers_need_leaves_gradients_alone():
    ours, theirs = ranks(2, out_of_data)
    assert theirs[0][:2] == theirs[1][:2] and ours[0][0] != ours[1][0] and ours[0][1] != ours[1][1]
    assert ours[1][2] == theirs[1][2] != ours[0][2]


def sharded_classes(rank):
    """The loss of logits that are sharded by class, after an update that raised within ``loss_parallel``."""
    mesh = init_device_mesh("cpu", (2,))

    def loss_fn(model, batch):
        if batch.isnan().any():
            raise KeyError
        return nn.functional.cross_entropy(model(batch), torch.zeros(5, dtype=torch.int64))

    torch.manual_seed(0)
    model = parallelize_module(nn.Linear(3, 4), mesh, ColwiseParallel(use_local_output=False))
    update = Update(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, loss_parallel=True)
    with pytest.raises(KeyError):
        Engine(update).run([torch.full((5, 3), math.nan)])
    loss = Engine(update).run([torch.ones(5, 3)]).output["loss"].item()
    torch.manual_seed(0)
    whole = nn.functional.cross_entropy(nn.Linear(3, 4)(torch.ones(5, 3)), torch.zeros(5, dtype=torch.int64))
    return loss, whole.item()


@pytest.mark.row("B8")
def test_loss_of_logits_that_are_sharded_by_class_is_that_of_the_whole_ones():
    for loss, whole in ranks(2, sharded_classes):
        assert loss == pytest.approx(whole)


# -- not finite -------------------------------------------------------------------------------------------------------


def planted(rank, folder, value, policy):
    """Batches of 2 on two ranks, groups of 2: iteration 3 has samples 16 to 23, the odd ones are rank 1's."""
    said, model = lines_of(rank, folder), linear()
    trainer, error = trainer_with(policy, DistributedDataParallel(model)), None
    try:
        trainer.run(loader(Planted(48, (19,), value), 2))
    except NotFinite as raised:
        error = str(raised)
    return trainer.state.iteration, trainer.state.optimizer_steps, error, one(model), said()


def in_one_process(iterations):
    """The weights after these iterations, in each of which a batch has all samples of both ranks."""
    model, data = linear(), Planted(48, ())
    of_ranks = torch.arange(48).view(-1, 2, 2, 2).transpose(-1, -2).reshape(-1)  # batches by rank, then by order
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = warmup_linear(optimizer, warmup=2, total=20)
    for steps, iteration in enumerate(iterations):
        optimizer.zero_grad()
        samples = of_ranks[8 * iteration - 8 : 8 * iteration]
        mse(model, (data.inputs[samples], data.targets[samples])).backward()
        optimizer.param_groups[0]["lr"] = schedule.lrs_at(steps)[0]
        optimizer.step()
    return one(model)


@pytest.mark.parametrize("value", [math.nan, INFINITE_GRADIENTS, NO_GRADIENTS])
@pytest.mark.parametrize("policy", [None, "skip", "stop"])
def test_both_ranks_act_alike_and_one_says_where(policy, value, tmp_path):
    outcomes = ranks(2, planted, tmp_path, value, policy)
    (iteration, steps, error, weights, lines), (*_, others, silent) = outcomes
    assert outcomes[1][:3] == (iteration, steps, error) and silent == []
    assert torch.equal(weights.nan_to_num(), others.nan_to_num())
    if policy is None:
        assert [line.startswith("The weights are not finite") for line in lines] == [True] * (value != NO_GRADIENTS)
        assert weights.isnan().all() or value == NO_GRADIENTS
        return
    name, where = ("gradient norm", "loss is finite") if value == INFINITE_GRADIENTS else ("loss", "on rank 1")
    said = error if policy == "stop" else lines[0]
    assert said.startswith(f"The {name} of iteration 3 is ") and where in said
    assert (iteration, steps, len(lines)) == ((3, 2, 0) if policy == "stop" else (6, 5, 1))
    expected = in_one_process([1, 2] if policy == "stop" else [1, 2, 4, 5, 6])
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


class Stream(IterableDataset):
    """This rank's share of the samples, of a length that nobody knows."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(dist.get_rank(), len(self.data), 2))


KEPT = [index for index in range(48) if index not in range(16, 24)]


def goes_back(rank, folder, kind):
    """A run that goes back in the iterations 3 and 9, and one whose data lack their samples."""
    said = lines_of(rank, folder)
    for data, policy in ((rollback.Spoiled((19,), 48), "rollback"), (Subset(Numbers(48), KEPT), None)):
        model = linear(dropout=True)
        wrapped = fully_shard(model) if kind == "sharded" else DistributedDataParallel(model)
        options = {"weight_fn": lambda batch: len(batch[0])} if kind == "stream" else {}
        trainer = rollback.trainer_of(folder / str(policy), model=wrapped, policy=policy, **options)
        torch.manual_seed(rank)
        begun = rollback.noted(trainer, Events.ITERATION_STARTED)
        trainer.run(DataLoader(Stream(data), 2) if kind == "stream" else loader(data, 2), max_epochs=2)
        ends = [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in wrapped.parameters()]
        end = torch.cat([each.reshape(-1) for each in ends]).clone()
        yield end, begun, {at: entry["samples"] for at, entry in journal(trainer).items()} if policy else said()


def both_runs(rank, folder, kind):
    return list(goes_back(rank, folder, kind))


@pytest.mark.parametrize("kind", ["ddp", pytest.param("stream", marks=pytest.mark.nightly), "sharded"])
def test_two_ranks_go_back_together(kind, tmp_path):
    outcomes = ranks(2, both_runs, tmp_path, kind)
    for (end, begun, left_out), (whole, *_) in outcomes:
        assert torch.equal(end, whole) and torch.equal(end, outcomes[0][0][0]) and end.isfinite().all()
        assert begun == [1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12]
        samples = [None, None] if kind == "stream" else [[16, 18, 20, 22], [17, 19, 21, 23]]
        assert left_out == {3: samples, 9: samples}
    told = [[line for line in found[1][2] if "nan on rank 1" in line and "goes back" in line] for found in outcomes]
    assert (len(told[0]), len(told[1])) == (2, 0)
