"""The average over ranks that DDP would make within a backward, which a graph has none of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from ignite_engine.ranks.ddp_buffers import own_buffers, share_buffers
from ignite_engine.step.micro_batches import reducing_modules


def why_not(model: nn.Module) -> str | None:
    """Why a model that reduces gradients over ranks is not captured, as the end of a sentence; None: it may be."""
    reducing = reducing_modules(model)
    if not reducing:
        return None
    if reducing != [model] or not isinstance(model, DistributedDataParallel):
        return f"gradients are reduced over ranks by {type(reducing[0]).__name__}, not by DDP around the whole model"
    options = {
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "parameters_to_ignore": model.parameters_to_ignore,
        "mixed_precision": model.mixed_precision,
        "a communication hook": getattr(model, "_comm_hooks", None),
    }
    if (named := next((name for name, value in options.items() if value), None)) is not None:
        return f"DDP has {named}"
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm computes over ranks"
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return "a gradient is sparse"
    return None


class Averaged:
    """A group of micro-batches of a model in DDP, in which each rank computes gradients of its own.

    A rank may compute them by a graph while its peers do without, as the ranks meet only before the first forward,
    where DDP shares its buffers, and after the last backward.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    @contextmanager
    def group(self) -> Iterator[None]:
        """A context, after which ``parameter.grad`` holds the average over ranks; a collective."""
        self._ddp.reducer._rebuild_buckets()  # which a forward of one rank alone would wait for its peers in
        share_buffers(self._ddp)
        with own_buffers([self._ddp]), self._ddp.no_sync():
            yield
        self._average()

    def _average(self) -> None:
        reduced = dict[tuple[torch.dtype, torch.device], list[nn.Parameter]]()
        for name, parameter in self._ddp.module.named_parameters():
            if parameter.grad is not None:
                reduced.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            elif parameter.requires_grad:
                raise RuntimeError(
                    f"{name} has no gradient, which DDP would wait for: let the loss use it, freeze it before DDP is "
                    "made, or train with capture=False and DDP(find_unused_parameters=True)."
                )
        ranks = dist.get_world_size(self._ddp.process_group)
        for same in reduced.values():
            gradients = [_laid_out_as(parameter) for parameter in same]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(ranks)
            dist.all_reduce(flat, group=self._ddp.process_group)
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, average in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(average.view_as(gradient))


def _laid_out_as(parameter: nn.Parameter) -> Tensor:
    """The gradient, with the strides that a backward gives it: in those of a graph its norm is rounded otherwise."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() != parameter.stride():
        gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient)
    return gradient
