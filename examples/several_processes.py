"""The same function on one process or on several: two on the CPU, or one for each GPU.

    python examples/several_processes.py [runs/several_processes]
    torchrun --nproc-per-node 4 examples/several_processes.py [runs/several_processes]

The batch of 64 is shared by the ranks, so that each number of them makes the same updates, up to the rounding of sums.
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Parallel, Trainer, Update, loader
from ignite_engine.handlers import Checkpoint, GracefulStop, MetricLogger

BATCH_SIZE = 64  # of all ranks together


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def train(local_rank: int, directory: str) -> Trainer:
    """Runs on each rank; what is saved, logged and stopped is agreed between them."""
    torch.manual_seed(0)  # the same data and the same first weights on each rank
    inputs = torch.randn(1000, 8)
    samples = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    model = idist.auto_model(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))  # to the device, and in DDP
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-2))

    trainer = Trainer(Update(model, optimizer, loss_fn))
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)  # means over all ranks
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    GracefulStop().attach(trainer)
    checkpoint.resume()  # also what another number of ranks has saved
    ranks = idist.get_world_size()
    trainer.run(loader(samples, batch_size=BATCH_SIZE // ranks, shuffle=True), max_epochs=4)  # batch_size: per rank
    print(f"rank {idist.get_rank()} of {ranks}: {trainer.state.iteration} updates")
    return trainer


if __name__ == "__main__":
    on_gpus = torch.cuda.is_available()
    ranks = torch.cuda.device_count() if on_gpus else 2  # torchrun's own number takes its place
    with Parallel(backend="nccl" if on_gpus else "gloo", nproc_per_node=ranks) as parallel:
        parallel.run(train, *(sys.argv[1:] or ["runs/several_processes"]))
