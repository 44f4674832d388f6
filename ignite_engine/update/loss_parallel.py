"""The cross-entropy of logits that are sharded by class, without gathering them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import functional
from torch.overrides import TorchFunctionMode


@contextmanager
def loss_parallel_context() -> Iterator[None]:
    """torch's ``loss_parallel`` for forward and backward, which also ends on an error.

    Raises:
        ValueError: (by a cross-entropy inside) there are fewer classes than ranks need: on every rank, where torch
            would raise on the ranks without a class while their peers wait for them.
    """
    from torch.distributed.tensor.parallel import loss_parallel

    context = loss_parallel()
    context.__enter__()
    try:
        with _RefuseEmptyShards():
            yield
    finally:
        context.__exit__(None, None, None)  # torch's own does not end on an error


class _RefuseEmptyShards(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.cross_entropy:
            logits: Any = args[0] if args else (kwargs or {}).get("input")
            if hasattr(logits, "placements"):
                _check_classes(logits, min(1, logits.dim() - 1))
        return func(*args, **(kwargs or {}))


def _check_classes(logits: Any, dim: int) -> None:
    for placement, ranks in zip(logits.placements, logits.device_mesh.shape, strict=True):
        classes = logits.shape[dim]
        filled = -(-classes // -(-classes // ranks))
        if placement.is_shard(dim) and filled < ranks:
            raise ValueError(
                f"loss_parallel needs a class on every rank, but {classes} classes on {ranks} ranks leave "
                f"{ranks - filled} without one: pad the classes to a multiple of {ranks}, or use fewer ranks."
            )
