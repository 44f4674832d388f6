"""FSDP2: each rank holds a share of every weight, of its gradient and of the optimizer's state.

    python examples/fsdp.py [runs/fsdp]
    torchrun --nproc-per-node 4 examples/fsdp.py [runs/fsdp]

Each rank saves its share. What is saved resumes on any number of ranks, and loads into a model that is not sharded.
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from ignite_engine import Parallel, Trainer, Update, load_weights, loader
from ignite_engine.handlers import Checkpoint, GracefulStop, MetricLogger
from ignite_engine.ranks import use_mesh

BATCH_SIZE = 64  # of all ranks together


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))


def samples() -> TensorDataset:
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def train(local_rank: int, directory: str) -> tuple[int, int]:
    """Train, or resume; this rank's numbers, and those of all."""
    ranks, device = idist.get_world_size(), idist.device()
    mesh = use_mesh(init_device_mesh(device.type, (ranks,), mesh_dim_names=("data",)))
    model = network().to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after sharding, which replaces the parameters

    trainer = Trainer(Update(model, optimizer, loss_fn, clip_norm=1.0))
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    GracefulStop().attach(trainer)
    checkpoint.resume()
    trainer.run(loader(samples(), batch_size=BATCH_SIZE // ranks, shuffle=True), max_epochs=4)

    own = sum(each.to_local().numel() for each in model.parameters() if isinstance(each, DTensor))
    total = sum(each.numel() for each in model.parameters())
    print(f"rank {idist.get_rank()} holds {own:,} of {total:,} weights")
    if idist.get_rank() == 0:
        path = load_weights(network(), directory)
        print(f"a model on one process has the weights of {path.name}")
    return own, total


if __name__ == "__main__":
    on_gpus = torch.cuda.is_available()
    ranks = torch.cuda.device_count() if on_gpus else 2  # torchrun's own number takes its place
    with Parallel(backend="nccl" if on_gpus else "gloo", nproc_per_node=ranks) as parallel:
        parallel.run(train, *(sys.argv[1:] or ["runs/fsdp"]))
