"""Ranks of gloo on devices, which it does not send from, and one rank of the backend that is made for them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn

from ignite_engine import Parallel, Trainer, Update, loader
from tests.device.training import DEVICE, bits, net, run_saved, same
from tests.kit.tiny import Numbers, mse

pytestmark = pytest.mark.accelerator


def own_device():
    return torch.device(DEVICE.type, torch.accelerator.current_device_index())


def _noting(operation, kinds):
    def made(call, tensor, *peer):
        kinds.add(tensor.device.type)
        return operation(call, tensor, *peer)

    return made


def trained(local_rank, folder):
    """Rank-invariant, on this rank's device."""
    torch.manual_seed(local_rank)  # it begins with rank 0's weights
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).to(own_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trainer = Trainer(Update(model, optimizer, mse, accumulate="rank_invariant", clip_norm=1.0), global_micro_batches=4)
    losses = []
    sent = set()
    dist.P2POp = _noting(dist.P2POp, sent)  # in a process of its own, or without peers
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output["loss"].cpu()))
    trainer.run(loader(Numbers(41), 4, shuffle=True), max_epochs=2)
    found = [*bits(model), *losses]
    assert sent <= {"cpu"}, "gloo sends from the host's memory"
    torch.save(found, Path(folder) / f"{local_rank}.pt")
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_invariant_runs_on_devices_have_the_bits_of_one_rank(ranks, tmp_path):
    if 1 < torch.accelerator.device_count() < ranks:
        ranks = 2
    alone = trained(0, str(tmp_path))
    with Parallel("gloo", nproc_per_node=ranks) as parallel:
        parallel.run(trained, str(tmp_path))
    for rank in range(ranks):
        assert same(torch.load(tmp_path / f"{rank}.pt", weights_only=True), alone)


class Batches:
    """Without a length: each group is fetched before the ranks agree that there is one."""

    def __iter__(self):
        for number in range(3):
            yield torch.full((2, 3), float(number)), torch.ones(2, 1)


def _streams(local_rank, folder):
    trainer = Trainer(Update(model := net(own_device()), torch.optim.SGD(model.parameters(), lr=0.1), mse))
    trainer.run(Batches(), max_epochs=2)
    (Path(folder) / str(local_rank)).write_text(str(trainer.state.iteration))


def test_ranks_read_data_without_a_length(tmp_path):
    with Parallel("gloo", nproc_per_node=2) as parallel:
        parallel.run(_streams, str(tmp_path))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["6", "6"]


def _saves(local_rank, folder):
    run_saved(net(own_device()), Path(folder) / "checkpoints", 3)
    run_saved(net(own_device()), Path(folder) / "checkpoints", 5)


def test_one_rank_of_the_backend_of_the_device_saves_and_resumes(tmp_path):
    backend = "nccl" if DEVICE.type == "cuda" and dist.is_nccl_available() else "gloo"
    with Parallel(backend, nproc_per_node=1) as parallel:
        parallel.run(_saves, str(tmp_path))
    assert (tmp_path / "checkpoints" / "iteration_00000005").is_dir()
