"""One small model in every layout over gloo ranks, and processes that run phases of different numbers of ranks."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from ignite_engine import Trainer, Update, loader
from ignite_engine.checkpointing.digests import tensor_sha256
from ignite_engine.checkpointing.nested import dotted, walk
from ignite_engine.handlers import EMA, Checkpoint
from ignite_engine.ranks import agreement
from ignite_engine.ranks.mesh import use_mesh
from ignite_engine.run_directory import weights_sha256
from tests.builders import Numbers, mse
from tests.checkpointing.file_faults import start_child, wait_for

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def net() -> nn.Sequential:
    """Its sizes divide evenly by no number of ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1))


def in_layout(layout: str, model: nn.Sequential | None = None) -> tuple[nn.Module, int]:
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


def batches(size: int) -> DataLoader[Any]:
    """An epoch of four iterations of 12 samples each, shared by the data-parallel ranks."""
    return loader(Numbers(48), batch_size=12 // size, shuffle=True)


def look_at(model: nn.Module) -> None:
    """A forward without a backward, as an evaluation has it: FSDP2 then leaves parameters unsharded."""
    with torch.no_grad():
        model(torch.ones(2, 3))


def trainer_in(
    layout: str, folder: Path, optimizer: str = "adamw", model: nn.Sequential | None = None, **options: Any
) -> tuple[Trainer, Checkpoint, DataLoader[Any]]:
    """A trainer with an average that saves every two iterations, and its data."""
    module, size = in_layout(layout, model)
    trainer = Trainer(Update(module, OPTIMIZERS[optimizer](module.parameters()), mse, clip_norm=0.5))
    EMA(decay=0.9).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, look_at, module)
    checkpoint = Checkpoint(folder, **{"keep_last": 10, **options})
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    return trainer, checkpoint, batches(size)


def train(trainer: Trainer, data: DataLoader[Any], epochs: int = 2) -> dict[str, Any]:
    """Train to the end: the losses by iteration, means over ranks, and digests of the whole state."""
    losses: dict[int, float] = {}

    def keep(engine: Any) -> None:
        losses[engine.state.iteration] = agreement.mean_of(
            [row[0] for row in agreement.gather_floats([float(engine.state.output["loss"])])]
        )

    trainer.add_event_handler(Events.ITERATION_COMPLETED, keep)
    trainer.run(data, max_epochs=epochs)
    look_at(trainer.update.model)  # type: ignore[attr-defined]
    report = trainer.reproducibility()
    digest = weights_sha256(trainer.update.model)  # type: ignore[attr-defined]  # an Update
    return {"losses": losses, "state": whole_digests(trainer), "weights_sha256": digest, "report": report}


def gathered(value: Tensor) -> Tensor:
    """The whole of a sharded tensor, a collective; any other tensor itself."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def whole_digests(trainer: Trainer) -> dict[str, str]:
    """The digest of each tensor of model, optimizer and average, gathered from all ranks."""
    names = ("model", "optimizer", "ema")
    states = {name: trainer.registry.objects[name].state_dict() for name in names if name in trainer.registry.objects}
    leaves = {dotted(path): value for path, value in walk(states) if isinstance(value, Tensor)}
    return {name: tensor_sha256(gathered(value)) for name, value in leaves.items()}


Phase = tuple[int, Callable[[], Any]]
"""Ranks, and what each of them does."""


def run_phases(folder: Path, phases: Mapping[str, Phase], *, timeout_s: float = 100.0) -> dict[str, list[Any]]:
    """Each phase in turn, with a process group of its own size; the processes are the same for all of them.

    Returns:
        By phase what each of its ranks returned, through JSON.
    """

    def one_rank(rank: int) -> None:
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
    children = [start_child(lambda rank=rank: one_rank(rank)) for rank in ranks]  # type: ignore[misc]  # binds it
    codes = [wait_for(child, timeout_s=timeout_s)[0] for child in children]
    assert codes == [0] * len(codes)
    found = [json.loads((folder / f"answers_{rank}.json").read_text()) for rank in ranks]
    return {name: [each[name] for each in found[:world]] for name, (world, _) in phases.items()}
