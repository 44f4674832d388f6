"""Counting the collectives that a piece of code issues on this rank."""

from collections import Counter

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_engine.ranks.exchange import Exchange

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

    ``exchanges`` counts what the engine's ranks say to each other beside them.
    """

    def __init__(self):
        super().__init__()
        self.counts, self.exchanges = Counter(), 0
        self._exchange = Exchange.__call__

    def __enter__(self):
        Exchange.__call__ = self._count_and_exchange
        return super().__enter__()

    def __exit__(self, *error):
        Exchange.__call__ = self._exchange
        return super().__exit__(*error)

    @property
    def _count_and_exchange(self):
        def exchange(each, own):
            self.exchanges += 1
            return self._exchange(each, own)

        return exchange

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(each is DTensor for each in types):
            return NotImplemented  # seen again when it has become operations on plain tensors
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if (
            namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
            and "wait" not in name
            and "_wrap" not in name
        ):
            self.counts[NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))
