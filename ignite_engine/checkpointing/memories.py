"""The memory of tensors, which several of them may share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> int:
    """The address of a tensor's memory, which its views share."""
    return tensor.untyped_storage().data_ptr()


def compacted(tensors: Iterable[Tensor]) -> tuple[dict[int, Tensor], int]:
    """Copies of views into a memory that they do not fill together, by the ``id`` of the view; and the bytes of all.

    ``torch.save`` writes the whole memory of a view. Tensors that fill their memory need no copy, so that those that
    share it share it again when they are loaded.
    """
    views: dict[int, dict[Hashable, list[Tensor]]] = {}
    unused: dict[int, int] = {}
    size = 0
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_meta:
            continue
        memory, view = tensor.untyped_storage(), (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        address = memory.data_ptr()
        if view not in (same_memory := views.setdefault(address, {})):
            unused[address] = unused.get(address, memory.nbytes()) - tensor.nbytes
        same_memory.setdefault(view, []).append(tensor)
        size += tensor.nbytes
    copies: dict[int, Tensor] = {}
    for address, same_memory in views.items():
        for same_view in same_memory.values() if unused[address] > 0 else ():
            copies |= _copies_of(same_view)
    return copies, size


def _copies_of(same_view: Iterable[Tensor]) -> dict[int, Tensor]:
    """One copy for all tensors of a type."""
    copies: dict[int, Tensor] = {}
    of_type: dict[type, Tensor] = {}
    for tensor in same_view:
        kind = type(tensor)
        if kind not in of_type:
            copy = tensor.detach().clone()
            of_type[kind] = torch.nn.Parameter(copy, tensor.requires_grad) if kind is torch.nn.Parameter else copy
        copies[id(tensor)] = of_type[kind]
    return copies
