"""One small model in every layout over gloo ranks: ``ranks(2, work)`` of ``kit.processes`` calls what is here."""

import hashlib

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import EMA, Checkpoint
from ignite_engine.ranks import use_mesh
from tests.kit.resume import leaves
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
    world = dist.get_world_size()
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
        losses[engine.state.iteration] = float(idist.all_reduce(float(engine.state.output["loss"]), "SUM"))

    trainer.add_event_handler(Events.ITERATION_COMPLETED, keep)
    trainer.run(data, max_epochs=epochs)
    look_at(trainer.update.model)
    means = {iteration: total / dist.get_world_size() for iteration, total in losses.items()}
    return {"losses": means, "state": whole_digests(trainer), "report": trainer.reproducibility()}


def gathered(value):
    """The whole of a sharded tensor, a collective; any other tensor itself."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def whole_digests(trainer):
    """The digest of each tensor of model, optimizer and average, gathered from all ranks."""
    names = ("model", "optimizer", "ema")
    states = {name: trainer.registry.objects[name].state_dict() for name in names if name in trainer.registry.objects}
    found = {".".join(map(str, path)): value for path, value in leaves(states)}
    return {name: digest(gathered(value)) for name, value in found.items() if isinstance(value, torch.Tensor)}


def digest(tensor):
    """The same for the same bits, shape and type."""
    tensor = tensor.detach().contiguous()
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + content).hexdigest()
