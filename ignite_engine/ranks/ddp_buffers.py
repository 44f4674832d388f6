"""Buffers that differ between ranks: BatchNorm's statistics under DDP, of which a checkpoint holds rank 0's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine.ranks import agreement


def share_buffers(model: object) -> None:
    """Give every rank the buffers of rank 0, as DDP does by itself before its next forward in training; a collective.

    So an evaluation uses on each rank what a checkpoint made at the same step boundary holds. A model without DDP, or
    whose DDP does not broadcast buffers, is left unchanged.
    """
    for wrapped in data_parallel(model):
        if shared_buffers(wrapped):
            wrapped._sync_buffers()


def shared_buffers(wrapped: DistributedDataParallel) -> list[torch.Tensor]:
    """Those that all ranks get from rank 0 before each forward in training, so that they may differ after it."""
    ignored = wrapped.parameters_to_ignore
    named = wrapped.module.named_buffers() if wrapped.broadcast_buffers else ()
    return [buffer for name, buffer in named if name not in ignored]


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


def rescaled_weights(model: object) -> str | None:
    """Why a checkpoint would hold weights of rank 0 that the others do not have; None: none are rescaled.

    It is not seen by comparing the ranks alone, as any forward may be the first to change them, in an evaluation too.
    """
    if agreement.world_size() == 1 or not isinstance(model, nn.Module):
        return None
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            own = f"{str(name).removeprefix('module.')} rescales its weights (max_norm) on each rank by itself"
            return f"{own}, and those of rank 0 alone are saved"
    return None


def data_parallel(model: object) -> list[DistributedDataParallel]:
    """Each DDP in a model: the model itself, or those that it is made of, also compiled."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, DistributedDataParallel)]
