"""How a run's model is arranged over the ranks: DDP, FSDP2, HSDP, and tensor parallel by the task's plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import devices
from ignite_engine.ranks import agreement, mesh
from ignite_engine.runs.config import Config
from ignite_engine.runs.task import Task
from ignite_engine.update.micro_batches import reducing_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def declare_mesh(config: Config) -> DeviceMesh | None:
    """Make and declare the mesh of the config's ``distributed`` section; a collective.

    Returns:
        With the dimensions ``replicate`` (HSDP), ``shard`` and ``tensor``, as far as they are used; None: every rank
        has data and a model of its own.

    Raises:
        ConfigError: the ranks cannot be arranged like that.
    """
    section, ranks = config.distributed, agreement.world_size()
    mesh.use_mesh(None)
    tensor, is_ddp = section.tensor_parallel, section.strategy == "ddp"
    if ranks == 1 or (is_ddp and tensor == 1):
        return None
    if is_ddp and ranks > tensor:
        raise config.error("distributed.strategy", "got 'ddp', but DDP cannot reduce split tensors; give fsdp or hsdp.")
    if config.update.accumulate == "rank_invariant":
        complaint = f"got 'rank_invariant' with {section.strategy} and tensor_parallel {tensor}; expected whole models."
        raise config.error("update.accumulate", complaint)
    shape = {"shard": ranks // tensor, "tensor": tensor}
    if section.strategy == "hsdp":
        sharing = section.shard_ranks or max(idist.get_nproc_per_node() // tensor, 1)
        shape = {"replicate": ranks // tensor // sharing, "shard": sharing, "tensor": tensor}
    if math.prod(shape.values()) != ranks:
        raise config.error("distributed", f"got {ranks} ranks, which tensor_parallel and shard_ranks do not divide.")
    if tensor == 1:
        del shape["tensor"]
    from torch.distributed.device_mesh import init_device_mesh

    made = init_device_mesh(devices.for_models().type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    return mesh.use_mesh(made)


def wrap(config: Config, task: Task, arranged: DeviceMesh | None) -> Task:
    """The task with its model on its device and wrapped, and the parameter groups of that model; a collective.

    A model that the task has wrapped itself is left as it is.

    Args:
        arranged: from :func:`declare_mesh`.

    Raises:
        ConfigError: a setting does not fit.
    """
    model, section = task.model, config.distributed
    if reducing_modules(model) or any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return task
    if arranged is None:
        is_unwrapped = agreement.world_size() == 1 or config.update.accumulate == "rank_invariant"
        # on one process auto_model would make a DataParallel of several GPUs
        return replace(task, model=_placed(model) if is_unwrapped else _in_ddp(config, model))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _placed(model)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)  # as DDP does: each rank keeps a part of the same weights
    if section.tensor_parallel > 1:
        if task.parallelize is None:
            given = f"got {section.tensor_parallel}"
            raise config.error("distributed.tensor_parallel", f"{given}, but the task has no parallelize(model, mesh).")
        task.parallelize(model, arranged["tensor"])
    if section.strategy != "ddp":
        _shard(model, arranged[("replicate", "shard") if section.strategy == "hsdp" else "shard"], section.param_dtype)
    return replace(task, parameter_groups=_renewed(task.parameter_groups, names, model))


def _placed(model: nn.Module) -> nn.Module:
    """The model on this process's device; one that the task has put on a device, or on several, stays there."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors):
        return model
    return model.to(devices.for_models())


def _in_ddp(config: Config, model: nn.Module) -> nn.Module:
    section = config.distributed
    model = _placed(nn.SyncBatchNorm.convert_sync_batchnorm(model) if section.sync_bn else model)
    # not Ignite's auto_model, for which a rank's device is that of its number: ranks of gloo may share one
    options = {name: value for name, value in asdict(section.ddp_options).items() if value is not None}
    return DistributedDataParallel(model, **options)


def _shard(model: nn.Module, over: DeviceMesh, dtype: str) -> None:
    """``fully_shard`` each layer (what an ``nn.ModuleList`` holds), the innermost first, then the model."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    inner, outer = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if dtype == "bf16":
        inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        outer = replace(inner, output_dtype=torch.float32)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in reversed([layer for layers in lists for layer in layers]):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=over, mp_policy=inner)
    fully_shard(model, mesh=over, mp_policy=outer)


def _renewed(groups: Any, names: Mapping[int, str], model: nn.Module) -> Any:
    """The groups over the parameters that have replaced those of ``names``."""
    now = dict(model.named_parameters())

    def renewed(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return now.get(names.get(id(given), ""), given)
        if isinstance(given, Mapping):
            return {key: renewed(value) for key, value in given.items()}
        is_list = isinstance(given, Iterable) and not isinstance(given, str)
        return [renewed(each) for each in given] if is_list else given

    return renewed(groups)
