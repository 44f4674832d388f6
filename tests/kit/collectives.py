"""Counting the collectives that a piece of code issues on this rank."""

from collections import Counter

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast",
}


class Collectives(TorchDispatchMode):
    """Within it, ``counts`` grows with each collective of this process, by kind, backward on the CPU included.

    Rows of float64 are left out: those are of what the engine's ranks ask of each other, once in an iteration.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(each is DTensor for each in types):
            return NotImplemented  # seen again when it has become operations on plain tensors
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if (
            namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
            and "wait" not in name
            and "_wrap" not in name
            and not (name == "allreduce_" and args[0][0].dtype is torch.float64 and args[0][0].dim())
        ):
            self.counts[NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))
