"""DDP: buffers that differ between ranks, and the layout in which gradients are reduced.

A sum over three ranks or more is rounded in an order that depends on where in a bucket an element is. DDP reduces its
first step in one bucket and rebuilds the buckets after it, so the first step of a resumed run would have other bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_settled: WeakSet[DistributedDataParallel] = WeakSet()


def data_parallel(model: object) -> list[DistributedDataParallel]:
    """Each DDP in a model: the model itself, or those that it is made of, also compiled."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


# -- buffers such as BatchNorm's statistics, of which a checkpoint holds rank 0's ---------------------------------


def share_buffers(model: object) -> None:
    """Give every rank the buffers of rank 0, as DDP does by itself before its next forward in training; a collective.

    So an evaluation uses on each rank what a checkpoint made at the same step boundary holds. A model without DDP, or
    whose DDP does not broadcast buffers, is left unchanged.
    """
    for wrapped in data_parallel(model):
        if shared_buffers(wrapped):
            wrapped._sync_buffers()


def shared_buffers(wrapped: DistributedDataParallel) -> list[torch.Tensor]:
    """The buffers that DDP broadcasts from rank 0 before each forward in training; after it they may differ."""
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


# -- buckets ------------------------------------------------------------------------------------------------------


def settle_buckets(model: object) -> None:
    """Let DDP rebuild its buckets before its first step, in the order of the parameters; a collective, once a DDP.

    One reduction of zeros; no gradient is left behind and no hook of the module is called. Two ranks, whose sums have
    no order, and a DDP that never rebuilds (``find_unused_parameters``) need none.
    """
    for wrapped in data_parallel(model):
        # Ignite's auto_model takes a rank's number for that of its device; ranks of gloo may share one
        index = next(wrapped.module.parameters()).device.index
        if wrapped.device_ids and wrapped.device_ids != [index]:
            wrapped.device_ids, wrapped.output_device = [index], index
        if wrapped in _settled or _keeps_its_buckets(wrapped) or wrapped.static_graph:
            continue
        _settled.add(wrapped)
        parameters = [parameter for parameter in wrapped.module.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in parameters]
        try:
            with torch.enable_grad():
                loss = _zero(wrapped.module, parameters)
                wrapped.reducer.prepare_for_backward([])  # as the end of a forward does; the next one rebuilds
                loss.backward()
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient


def unsettled_buckets(model: object) -> str | None:
    """Why the first step of a resumed run is summed in another order than without the interruption; else None."""
    if not any(wrapped.static_graph and not _keeps_its_buckets(wrapped) for wrapped in data_parallel(model)):
        return None
    return "DDP with static_graph rebuilds its buckets after the first step: that of a resumed run is summed otherwise"


def _keeps_its_buckets(wrapped: DistributedDataParallel) -> bool:
    unused = wrapped.find_unused_parameters and not wrapped.static_graph
    return unused or dist.get_world_size(wrapped.process_group) < 3


def _zero(module: nn.Module, parameters: Sequence[Tensor]) -> Tensor:
    """A loss in which every parameter has a part.

    Backward reaches the last parameter first, as it does in most models.
    """
    embeddings = [layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(layer.weight) for layer in embeddings if layer.sparse}
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        if id(parameter) in sparse:
            first = torch.zeros(1, dtype=torch.long, device=parameter.device)
            part = nn.functional.embedding(first, parameter, sparse=True)
        else:
            part = parameter.reshape(-1)[:1]
        total = total.to(parameter.device) + part.sum() * 0
    return total
