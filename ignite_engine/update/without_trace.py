"""Zero-weight forward and backward of a rank whose data has run out, for its peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ignite_engine import rng
from ignite_engine.ranks.ddp_buffers import data_parallel, shared_buffers


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Restore the random number generators and the model's buffers, such as BatchNorm's statistics, afterwards.

    For forward AND backward: the latter may need the buffers as they were in the former. Those that DDP shares become
    what it made them before the first forward: they follow from what rank 0 saves.
    """
    buffers = [
        (module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    values = {id(buffer): buffer.detach().clone() for _, _, buffer in buffers}
    with ExitStack() as hooks:
        for wrapped in data_parallel(model):
            hooks.callback(_note_shared(wrapped, values).remove)
        with rng.isolated():
            yield
    with torch.no_grad():
        for module, name, buffer in buffers:
            buffer.copy_(values[id(buffer)])
            setattr(module, name, buffer)


def _note_shared(wrapped: DistributedDataParallel, values: dict[int, Tensor]) -> RemovableHandle:
    """Keep the buffers that ``wrapped`` shares in ``values`` as they are when the model inside is called first."""

    def note(module: nn.Module, inputs: object) -> None:
        values.update((id(buffer), buffer.detach().clone()) for buffer in shared_buffers(wrapped))
        handle.remove()

    handle: RemovableHandle = wrapped.module.register_forward_pre_hook(note)
    return handle


@contextmanager
def without_rows(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let a backward that weighs zero name no row in sparse gradients.

    A row of zeros is not nothing: SparseAdam moves it on by its momentum, while a process that has all the data and
    no such batch leaves it alone.
    """
    with ExitStack() as hooks:
        for parameter in parameters:
            if parameter.requires_grad:
                hooks.callback(parameter.register_hook(_no_row).remove)
        yield


def _no_row(gradient: Tensor) -> Tensor:
    if not gradient.is_sparse:
        return gradient
    return torch.zeros_like(gradient)  # of a sparse tensor: without entries
