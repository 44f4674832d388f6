"""Zero-weight forward and backward of a rank whose data has run out, for its peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Restore the random number generators and the model's buffers, such as BatchNorm's statistics, afterwards.

    For forward AND backward: the latter may need the buffers as they were in the former.
    """
    buffers = [
        (module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    values = {id(buffer): buffer.detach().clone() for _, _, buffer in buffers}
    yield
    with torch.no_grad():
        for module, name, buffer in buffers:
            buffer.copy_(values[id(buffer)])
            setattr(module, name, buffer)


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
