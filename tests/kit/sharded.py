"""One small model in every layout over gloo ranks, and processes that run phases of different numbers of ranks."""

import json
import logging
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ignite_engine import Trainer, Update, loader
from ignite_engine.checkpointing.digests import tensor_sha256
from ignite_engine.checkpointing.nested import dotted, walk
from ignite_engine.handlers import EMA, Checkpoint
from ignite_engine.ranks import agreement
from ignite_engine.ranks.mesh import use_mesh
from ignite_engine.run_directory import weights_sha256
from tests.kit.faults import start_child, wait_for
from tests.kit.tiny import Numbers, mse

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def net():
    """Its sizes divide evenly by no number of ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1))


def in_layout(layout, model=None):
    """The model on all ranks of the default group, and the number of data-parallel ranks."""
    model = model or net()
    world = agreement.world_size()
    use_mesh(None)
    if layout == "plain":
        return model, 1
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model), world
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh), world
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh), world
    split = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if layout == "tp":
        mesh = use_mesh(init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",)))
        return parallelize_module(model, mesh, split), 1
    assert layout == "tp+fsdp"
    mesh = use_mesh(init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor")))
    parallelize_module(model, mesh["tensor"], split)
    return fully_shard(model, mesh=mesh["data"]), world // 2


def batches(size):
    """An epoch of four iterations of 12 samples each, shared by the data-parallel ranks."""
    return loader(Numbers(48), batch_size=12 // size, shuffle=True)


def look_at(model):
    """A forward without a backward, as an evaluation has it: FSDP2 then leaves parameters unsharded."""
    with torch.no_grad():
        model(torch.ones(2, 3))


def trainer_in(layout, folder, optimizer="adamw", model=None, **options):
    """A trainer with an average that saves every two iterations, and its data."""
    module, size = in_layout(layout, model)
    trainer = Trainer(Update(module, OPTIMIZERS[optimizer](module.parameters()), mse, clip_norm=0.5))
    EMA(decay=0.9).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, look_at, module)
    checkpoint = Checkpoint(folder, **{"keep_last": 10, **options})
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    return trainer, checkpoint, batches(size)


def train(trainer, data, epochs=2):
    """Train to the end: the losses by iteration, means over ranks, and digests of the whole state."""
    losses = {}

    def keep(engine):
        losses[engine.state.iteration] = agreement.mean_of(
            [row[0] for row in agreement.gather_floats([float(engine.state.output["loss"])])]
        )

    trainer.add_event_handler(Events.ITERATION_COMPLETED, keep)
    trainer.run(data, max_epochs=epochs)
    look_at(trainer.update.model)
    report = trainer.reproducibility()
    digest = weights_sha256(trainer.update.model)
    return {"losses": losses, "state": whole_digests(trainer), "weights_sha256": digest, "report": report}


def gathered(value):
    """The whole of a sharded tensor, a collective; any other tensor itself."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def whole_digests(trainer):
    """The digest of each tensor of model, optimizer and average, gathered from all ranks."""
    names = ("model", "optimizer", "ema")
    states = {name: trainer.registry.objects[name].state_dict() for name in names if name in trainer.registry.objects}
    leaves = {dotted(path): value for path, value in walk(states) if isinstance(value, Tensor)}
    return {name: tensor_sha256(gathered(value)) for name, value in leaves.items()}


Phase = tuple[int, Callable[[], Any]]
"""Ranks, and what each of them does."""


def run_phases(folder, phases, *, timeout_s=100.0):
    """Each phase in turn, with a process group of its own size; the processes are the same for all of them.

    Returns:
        By phase what each of its ranks returned, through JSON.
    """

    def one_rank(rank):
        torch.set_num_threads(1)
        logging.getLogger("torch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        answers = {}
        for number, (name, (world, work)) in enumerate(phases.items()):
            if rank >= world:
                continue
            store = f"file://{folder}/store_{os.getppid()}_{number}"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=20)
            )
            answers[name] = work()
            agreement.forget_groups()
            dist.destroy_process_group()
        (folder / f"answers_{rank}.json").write_text(json.dumps(answers))  # too much for a pipe

    ranks = range(max(world for world, _ in phases.values()))
    children = [start_child(lambda rank=rank: one_rank(rank)) for rank in ranks]
    codes = [wait_for(child, timeout_s=timeout_s)[0] for child in children]
    assert codes == [0] * len(codes)
    found = [json.loads((folder / f"answers_{rank}.json").read_text()) for rank in ranks]
    return {name: [each[name] for each in found[:world]] for name, (world, _) in phases.items()}
