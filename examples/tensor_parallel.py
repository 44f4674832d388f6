"""Tensor parallel: two ranks compute one layer together, each with its columns or rows, on the same batches.

    python examples/tensor_parallel.py [runs/tensor_parallel]
    torchrun --nproc-per-node 4 examples/tensor_parallel.py [runs/tensor_parallel]

On four ranks two such pairs have batches of their own.
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

from ignite_engine import Parallel, Trainer, Update, loader
from ignite_engine.handlers import Checkpoint, GracefulStop, MetricLogger
from ignite_engine.ranks import data_rank, data_size, use_mesh

BATCH_SIZE = 64  # of all ranks together
TENSOR = 2  # ranks that share a layer
CLASSES = 4


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, CLASSES))


def samples() -> TensorDataset:
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(dim=1))


def train(local_rank: int, directory: str) -> tuple[int, int]:
    """Train, or resume; this rank's numbers, and those of all."""
    device, shape = idist.device(), (idist.get_world_size() // TENSOR, TENSOR)
    mesh = use_mesh(init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor")))  # before the loader
    model = network().to(device)
    by_class = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": by_class})
    fully_shard(model, mesh=mesh["data"])  # reduces over the pairs
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + data_rank())  # the same dropout in a pair

    # the cross-entropy of logits that no rank has whole
    trainer = Trainer(Update(model, optimizer, loss_fn, clip_norm=1.0, loss_parallel=True))
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    GracefulStop().attach(trainer)
    checkpoint.resume()
    trainer.run(loader(samples(), batch_size=BATCH_SIZE // data_size(), shuffle=True), max_epochs=4)

    own = sum(each.to_local().numel() for each in model.parameters() if isinstance(each, DTensor))
    total = sum(each.numel() for each in model.parameters())
    print(f"rank {idist.get_rank()} holds {own:,} of {total:,} weights")
    return own, total


if __name__ == "__main__":
    on_gpus = torch.cuda.is_available()
    with Parallel(backend="nccl" if on_gpus else "gloo", nproc_per_node=TENSOR) as parallel:
        parallel.run(train, *(sys.argv[1:] or ["runs/tensor_parallel"]))
