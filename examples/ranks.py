"""The same function on one process or on several, each with a whole model (DDP) or with a share of it (FSDP2).

    python examples/ranks.py [ddp | fsdp] [runs/ranks]
    torchrun --nproc-per-node 4 examples/ranks.py fsdp

Without torchrun: two ranks on the CPU, or one for each GPU. The ranks share the batch, so each number of them makes the
same updates, up to the rounding of sums. A checkpoint resumes on any number of ranks, and loads without sharding.
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from ignite_engine import Parallel, Trainer, Update, load_weights, loader
from ignite_engine.handlers import Checkpoint, GracefulStop, MetricLogger
from ignite_engine.ranks import use_mesh

BATCH_SIZE = 64  # of all ranks together


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def network() -> nn.Sequential:
    torch.manual_seed(0)  # the same first weights on each rank
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))


def samples() -> TensorDataset:
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def sharded(layers: nn.Sequential) -> nn.Module:
    """FSDP2: each rank has a share of every weight, of its gradient and of the optimizer's state."""
    device, ranks = idist.device(), idist.get_world_size()
    mesh = use_mesh(init_device_mesh(device.type, (ranks,), mesh_dim_names=("data",)))
    for layer in layers.to(device):
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    return layers


def train(local_rank: int, kind: str, directory: str) -> Trainer:
    """Train, or resume; what is saved, logged and stopped is agreed between the ranks."""
    model = idist.auto_model(network()) if kind == "ddp" else sharded(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after sharding, which replaces the parameters
    trainer = Trainer(Update(model, optimizer, loss_fn, clip_norm=1.0))
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)  # means over all ranks
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    GracefulStop().attach(trainer)
    checkpoint.resume()
    trainer.run(loader(samples(), batch_size=BATCH_SIZE // idist.get_world_size(), shuffle=True), max_epochs=4)
    if idist.get_rank() == 0:
        path = load_weights(network(), directory)
        print(f"{trainer.state.iteration} updates; a model on one process has the weights of {path.name}")
    return trainer


if __name__ == "__main__":
    kind, directory = (*sys.argv[1:], *("ddp", "runs/ranks")[len(sys.argv) - 1 :])
    on_gpus = torch.cuda.is_available()
    ranks = torch.cuda.device_count() if on_gpus else 2  # torchrun's own number takes its place
    with Parallel(backend="nccl" if on_gpus else "gloo", nproc_per_node=ranks) as parallel:
        parallel.run(train, kind, directory)
