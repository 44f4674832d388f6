"""The data-parallel ranks: the processes that train on data of their own; by default all."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn

from ignite_engine.ranks import agreement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
M = TypeVar("M", bound="DeviceMesh | None")

DATA_DIMS = ("data", "dp", "replicate", "shard", "dp_replicate", "dp_shard")
TENSOR_DIMS = ("tensor", "tp")


# by the default group, which a mesh must not outlive
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, list[list[int]]] = weakref.WeakKeyDictionary()


def _sharing() -> list[list[int]]:
    """By data rank, the ranks that share its data."""
    world = agreement.world_size()
    declared = _meshes.get(dist.group.WORLD) if world > 1 and dist.group.WORLD is not None else None
    return declared or [[rank] for rank in range(world)]


def use_mesh(mesh: M) -> M:
    """Declare how the ranks of this process's group are arranged: from now on data is shared out by this mesh.

    Ranks that differ in a tensor-parallel dimension only are one data rank: they get the same batches, count once in
    weights, lengths and metrics, and are to be seeded alike (:func:`data_rank`). Call it on every rank, before loaders
    are made. It holds until another mesh is declared or the process group ends.

    Args:
        mesh: of all ranks, its dimensions named: ``data``, ``dp``, ``replicate``, ``shard``, ``dp_replicate`` or
            ``dp_shard`` for ranks with data of their own, ``tensor`` or ``tp`` for ranks that share it. None: every
            rank has data of its own again.

    Returns:
        ``mesh``.

    Raises:
        ValueError: a dimension has no name or an unknown one, or ranks are missing.
    """
    if mesh is None:
        _meshes.clear()
        return mesh
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
    together = math.prod(size for name, size in zip(names, mesh.mesh.shape, strict=True) if name in TENSOR_DIMS)
    assert dist.group.WORLD is not None
    _meshes[dist.group.WORLD] = mesh.mesh.permute(order).reshape(-1, together).tolist()
    return mesh


def data_rank() -> int:
    """This process's number among the data-parallel ranks; the rank if no mesh is declared."""
    rank = agreement.rank()
    return next(row for row, ranks in enumerate(_sharing()) if rank in ranks)


def data_size() -> int:
    """The number of data-parallel ranks; the world size if no mesh is declared."""
    return len(_sharing())


def by_data_rank(values: Sequence[T]) -> list[T]:
    """One value per data rank, from one value per rank: its first rank's."""
    return [values[ranks[0]] for ranks in _sharing()]


@contextmanager
def metrics_reduce(ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Within it ``ignite.distributed`` counts, sums and gathers as metrics need it: over the data-parallel ranks.

    It gathers tensors of different lengths, too, as an order without padding gives them to the ranks. Within
    another one it changes nothing. A collective of all ranks.

    Args:
        ranks: of which alone it is, because the others have nothing to reduce: a metric raises there before it reduces.
            None: all.
    """
    if _instead.get():
        yield
        return
    idist.get_world_size()  # Ignite's first look at a process group is a collective of all ranks
    columns = [[rank for rank in column if ranks is None or rank in ranks] for column in zip(*_sharing(), strict=True)]
    group = None if columns == [[*range(agreement.world_size())]] else agreement.subgroup(columns)
    functions: dict[str, Any] = {"all_gather": partial(_gather, group)}
    if group is not None:
        for name in ("all_reduce", "all_gather_tensors_with_shapes"):
            functions[name] = partial(getattr(idist.utils, name), group=group)
        functions["get_rank"] = partial(dist.get_rank, group)
        functions["get_world_size"] = partial(dist.get_world_size, group)
        functions["broadcast"] = partial(_broadcast, group)
    for name in functions:
        setattr(idist, name, partial(_call, name))  # for good: which function it is each thread says for itself
    token = _instead.set(functions)
    try:
        yield
    finally:
        _instead.reset(token)


_instead: ContextVar[Mapping[str, Any]] = ContextVar("instead", default=MappingProxyType({}))
"""What this thread calls in the place of functions of ``ignite.distributed``, by their names."""


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    return _instead.get().get(name, getattr(idist.utils, name))(*args, **kwargs)


def _broadcast(group: Any, value: Any, src: int = 0, safe_mode: bool = False) -> Any:
    box = [value]
    dist.broadcast_object_list(box, group_src=src, group=group)
    return box[0]


def _gather(of_data: Any, value: Any, group: Any = None) -> Any:
    gather: Any = idist.utils.all_gather
    group = group or of_data
    if not isinstance(value, torch.Tensor) or not value.dim():
        return gather(value, group=group)
    lengths = gather(torch.tensor([len(value)], device=value.device), group=group).tolist()
    if min(lengths) == max(lengths):
        return gather(value, group=group)
    shapes = [(length, *value.shape[1:]) for length in lengths]
    return torch.cat(idist.utils.all_gather_tensors_with_shapes(value, shapes, group=group))


def waits_for_peers(model: nn.Module) -> bool:
    """Whether each forward gathers weights from other data-parallel ranks, as FSDP2's does."""
    return any(map(is_sharded, model.modules()))


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards it; ``replicate()`` sets when it reduces, too, and leaves it whole."""
    return all(hasattr(module, mark) for mark in ("set_requires_gradient_sync", "reshard"))
