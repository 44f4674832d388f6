"""The data-parallel ranks: which processes train on data of their own, by default all of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ignite_engine.ranks import agreement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

DATA_DIMS = ("data", "dp", "replicate", "shard", "dp_replicate", "dp_shard")
TENSOR_DIMS = ("tensor", "tp")

_declared: tuple[weakref.ref[Any], list[list[int]]] | None = None
"""The default process group of a declared mesh, and for each data rank the ranks that share its data."""


def use_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Declare how the ranks of this process's group are arranged: from now on data is shared out by this mesh.

    Ranks that differ in a tensor-parallel dimension only are one data rank: they get the same batches, count once in
    weights, lengths and metrics, and are to be seeded alike (:func:`data_rank`). Call it on every rank, before loaders
    are made. It holds until another mesh is declared or the process group ends.

    Args:
        mesh: of all ranks, its dimensions named: ``data``, ``dp``, ``replicate``, ``shard``, ``dp_replicate`` or
            ``dp_shard`` for ranks with data of their own, ``tensor`` or ``tp`` for ranks that share it.

    Returns:
        ``mesh``.

    Raises:
        ValueError: a dimension has no name or an unknown one, or ranks are missing.
    """
    global _declared
    names = tuple(mesh.mesh_dim_names or ())
    unknown = [name for name in names if name not in DATA_DIMS + TENSOR_DIMS]
    if unknown or not names:
        got = f"got {unknown[0]!r}" if unknown else "got none"
        raise ValueError(
            "Dimensions of a mesh need names that say which ranks share their data, "
            f"{got}: name them {', '.join(DATA_DIMS)} (data of their own) or {', '.join(TENSOR_DIMS)} (the same data)."
        )
    world = agreement.world_size()
    if sorted(mesh.mesh.flatten().tolist()) != list(range(world)):
        raise ValueError(
            f"use_mesh() needs a mesh of all {world} ranks, each once, got {mesh.mesh.tolist()}: "
            "give the whole mesh, not a part such as mesh['tensor']."
        )
    order = sorted(range(len(names)), key=lambda dim: names[dim] in TENSOR_DIMS)
    shared = [size for name, size in zip(names, mesh.mesh.shape, strict=True) if name in TENSOR_DIMS]
    together = 1
    for size in shared:
        together *= size
    rows = mesh.mesh.permute(order).reshape(-1, together).tolist()
    _declared = weakref.ref(dist.group.WORLD), rows
    return mesh


def data_rank() -> int:
    """This process's place among the data-parallel ranks; the rank where no mesh is declared."""
    rank = agreement.rank()
    sharing = _sharing()
    return rank if sharing is None else next(row for row, ranks in enumerate(sharing) if rank in ranks)


def data_size() -> int:
    """How many ranks have data of their own; the world size where no mesh is declared."""
    sharing = _sharing()
    return agreement.world_size() if sharing is None else len(sharing)


def by_data_rank(values: Sequence[T]) -> list[T]:
    """Of one value per rank, as a gather gives them, that of the first rank of each data rank."""
    sharing = _sharing()
    return list(values) if sharing is None else [values[ranks[0]] for ranks in sharing]


def _sharing() -> list[list[int]] | None:
    if _declared is None or not dist.is_initialized() or _declared[0]() is not dist.group.WORLD:
        return None
    return _declared[1]
