"""A forward and backward that only the peers need: of a batch that an exhausted rank repeats with weight zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ignite_engine import rng


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Restore the random number generators and the model's buffers, such as BatchNorm's statistics, afterwards.

    For forward AND backward: the latter may need the buffers as they were in the former.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with rng.isolated():
        yield
    with torch.no_grad():
        for module, name, buffer, value in buffers:
            buffer.copy_(value)
            setattr(module, name, buffer)
