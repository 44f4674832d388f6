"""The layout in which DDP reduces gradients, the same in a resumed run as in the uninterrupted one.

A sum over three ranks or more is rounded in an order that depends on where in a bucket an element is. DDP reduces its
first step in one bucket and rebuilds the buckets after it, so the first step of a resumed run would have other bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine.ranks.ddp_buffers import data_parallel

_settled: WeakSet[DistributedDataParallel] = WeakSet()


def settle_buckets(model: object) -> None:
    """Let DDP rebuild its buckets before its first step, in the order of the parameters; a collective, once a DDP.

    One reduction of zeros; no gradient is left behind and no hook of the module is called. Two ranks, whose sums have
    no order, and a DDP that never rebuilds (``find_unused_parameters``) need none.
    """
    for wrapped in data_parallel(model):
        _take_device_of_module(wrapped)
        if wrapped not in _settled and not _keeps_its_buckets(wrapped) and not wrapped.static_graph:
            _settle(wrapped)


def _take_device_of_module(wrapped: DistributedDataParallel) -> None:
    """Ignite's ``auto_model`` takes a rank's number for that of its device; ranks of gloo may share one."""
    index = next(wrapped.module.parameters()).device.index
    if wrapped.device_ids and wrapped.device_ids != [index]:
        wrapped.device_ids, wrapped.output_device = [index], index


def _settle(wrapped: DistributedDataParallel) -> None:
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
    """Why a resumed run's first step is summed in another order than in the uninterrupted run; None: it is not."""
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
        part = part.abs() if part.is_complex() else part
        total = total.to(parameter.device) + part.sum() * 0
    return total
