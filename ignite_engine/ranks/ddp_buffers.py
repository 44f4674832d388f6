"""Buffers that differ between ranks: BatchNorm's statistics under DDP, of which a checkpoint holds rank 0's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from ignite_engine.ranks import agreement


def share_buffers(model: object) -> None:
    """Give every rank the buffers of rank 0, as DDP does by itself before its next forward in training; a collective.

    So an evaluation uses on each rank what a checkpoint made at the same step boundary holds. A model without DDP, or
    whose DDP does not broadcast buffers, is left unchanged.
    """
    for wrapped in data_parallel(model):
        if wrapped.broadcast_buffers:
            _share_buffers(wrapped)


def _share_buffers(wrapped: DistributedDataParallel) -> None:
    group = wrapped.process_group
    ignored = wrapped.parameters_to_ignore
    buffers = [buffer for name, buffer in wrapped.module.named_buffers() if name not in ignored]
    for kind in dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers):
        same = [buffer for buffer in buffers if (buffer.dtype, buffer.device) == kind]
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in same])
        sizes = [buffer.numel() for buffer in same]
        dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
        with torch.no_grad():
            for buffer, values in zip(same, flat.split(sizes), strict=True):
                buffer.copy_(values.view_as(buffer))


@contextmanager
def own_buffers(models: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """A context in which no forward broadcasts buffers: ranks may run a different number of them."""
    before = [wrapped.require_forward_param_sync for wrapped in models]
    for wrapped in models:
        wrapped.require_forward_param_sync = False
    try:
        yield
    finally:
        for wrapped, value in zip(models, before, strict=True):
            wrapped.require_forward_param_sync = value


def unshared_state(model: object) -> str | None:
    """Why what a checkpoint holds of the model is not what every rank has, but rank 0's; None: it is."""
    if agreement.world_size() == 1 or not isinstance(model, nn.Module):
        return None
    parallel = data_parallel(model)
    broadcast = {id(module) for wrapped in parallel if wrapped.broadcast_buffers for module in wrapped.modules()}
    for name, module in model.named_modules():
        own = None
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            own = "rescales its weights (max_norm) on each rank by itself"
        elif isinstance(module, _NormBase) and module.running_mean is not None:
            shared = id(module) in broadcast or isinstance(module, nn.SyncBatchNorm)
            own = None if shared else "keeps statistics of each rank's own"
        if own is not None:
            return f"{str(name).removeprefix('module.')} {own}, and those of rank 0 alone are saved"
    for wrapped in parallel:
        saved = {} if wrapped.broadcast_buffers else wrapped.module.state_dict()
        for name, buffer in wrapped.module.named_buffers():
            if name in saved and buffer.is_floating_point():
                return (
                    f"the buffer {name} is each rank's own (broadcast_buffers=False), and that of rank 0 alone is saved"
                )
    return None


def data_parallel(model: object) -> list[DistributedDataParallel]:
    """Each DDP in a model: the model itself, or those that it is made of, also compiled."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, DistributedDataParallel)]
