"""Tensors that are sharded over ranks (DTensor): each rank writes its pieces, and a load reads the pieces it needs.

In the shared file, a sharded tensor is replaced by a tensor on the meta device with the whole shape and no values.
The values are in a part of each rank's own (:data:`PIECES`): by part and path, the offset of the piece and the piece. A
piece that several ranks hold (replicas in HSDP, parameters that tensor parallelism does not split) is written once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ignite_engine.checkpoint.nested import Path, TooDeep, dotted, rebuilt_with_paths, refused, walk
from ignite_engine.errors import CheckpointError

Shape = tuple[int, ...]
_Pieces = dict[Path, tuple[list[int], Tensor]]
"""By path, the offset of a piece in the whole tensor, and its values."""
_PiecesOfParts = dict[str, _Pieces]
PIECES = "pieces of sharded tensors"
"""The name of the part that holds a rank's pieces."""


class Region(NamedTuple):
    """A box in a tensor: its first element, and its extent in each dimension."""

    offset: Shape
    shape: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as slices of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(*self, strict=True))

    def within(self, outer: Region) -> tuple[slice, ...]:
        """The intersection of both boxes, as slices of a tensor that holds ``outer``."""
        return tuple(
            slice(max(start - begin, 0), max(min(start + size, begin + extent) - begin, 0))
            for start, size, begin, extent in zip(*self, *outer, strict=True)
        )


@dataclass(frozen=True)
class Shards:
    """Describes the sharded tensors in the state of a rank."""

    layout: tuple[str, ...] = ()
    """Mesh and placements, such as ``2 x 2 (Replicate, Shard(0))``; empty: nothing is sharded."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """By part, the number of elements of its sharded tensors, over all ranks."""

    def missing(self, rank: int, pieces: Mapping[str, _Pieces]) -> dict[str, int]:
        """By part, a count of missing elements; it sums to zero over all ranks if their pieces cover each tensor."""
        count = Counter(self.numbers if rank == 0 else ())
        for part, of_part in pieces.items():
            count[part] -= sum(values.numel() for _, values in of_part.values())
        return dict(count)


class Sharded(Tensor):
    """A saved tensor that was not read yet: a meta tensor of the whole shape, with its pieces on disk."""

    pieces: Sequence[Piece]

    def read(self) -> Tensor:
        """The whole tensor, on the CPU.

        Raises:
            CheckpointError: a file with one of its pieces is damaged.
        """
        return _read(self, Region((0,) * self.dim(), tuple(self.shape)))


def whole(value: Any) -> Any:
    """Read a :class:`Sharded`; return anything else as it is."""
    return value.read() if isinstance(value, Sharded) else value


class Piece(NamedTuple):
    """A piece on disk; its file is verified before its values are used."""

    region: Region
    values: Tensor
    verify: Callable[[], None]


FoundPieces = dict[tuple[str, Path], list[Piece]]
"""The pieces of each tensor, by its part and path."""


def is_sharded(value: Any) -> bool:
    """Whether this is a DTensor, split or replicated."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def local_piece(value: Tensor) -> Tensor:
    """This rank's piece of a sharded tensor; any other tensor itself."""
    return value.detach().to_local() if is_sharded(value) else value  # type: ignore[attr-defined]  # a DTensor


def layout_of(tensors: Iterable[Any]) -> tuple[str, ...]:
    """The distinct meshes and placements of the DTensors among these, as text."""
    found: dict[str, None] = {}
    for value in filter(is_sharded, tensors):
        kinds = (
            f"Shard({placement.dim})" if hasattr(placement, "dim") else "Replicate" for placement in value.placements
        )
        found[f"{' x '.join(map(str, value.device_mesh.shape))} ({', '.join(kinds)})"] = None
    return tuple(sorted(found))


def region_of(tensor: Any) -> Region | None:
    """The box of the whole tensor that this rank holds of a DTensor; None: the rank is not in its mesh.

    Raises:
        ValueError: the end of a sentence; a placement is Partial, or unknown here.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    offset, shape = [0] * tensor.dim(), list(tensor.shape)
    # FSDP2 splits what tensor parallelism has split before: a strided placement comes after those to its right
    for index in sorted(range(len(placements)), key=lambda place: hasattr(placements[place], "split_factor")):
        if placements[index].is_replicate():
            continue
        dim = getattr(placements[index], "dim", None)
        if dim is None or not _splits(placements, index, mesh.shape):
            raise ValueError(f"its placements {placements} are not among those that can be saved")
        step = -(-shape[dim] // mesh.shape[index])
        first = min(step * coordinate[index], shape[dim])
        offset[dim], shape[dim] = offset[dim] + first, min(step, shape[dim] - first)
    held = tuple(local_piece(tensor).shape)
    if tuple(shape) != held and not (0 in shape and 0 in held):  # torch's shapes of empty pieces differ
        raise ValueError(f"this rank holds {held} of it where its placements {placements} give {tuple(shape)}")
    return Region(tuple(offset), tuple(shape))


def _splits(placements: Sequence[Any], index: int, mesh_shape: Sequence[int]) -> bool:
    """Whether this placement splits its dimension; a strided one must match the ordinary ones to its right."""
    factor = getattr(placements[index], "split_factor", None)
    if factor is None:
        return bool(placements[index].is_shard())
    same = [place for place, other in enumerate(placements) if getattr(other, "dim", None) == placements[index].dim]
    others = [place for place in same if place != index]
    return (
        min(same) == index
        and factor == math.prod([mesh_shape[place] for place in others])
        and all(not hasattr(placements[place], "split_factor") for place in others)
    )


def without_shards(
    shared: Mapping[str, Any], local: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any], Shards]:
    """Replace each sharded tensor by a placeholder, and collect this rank's pieces in a part of its own.

    The pieces are not copied.

    Raises:
        CheckpointError: names a value that cannot be saved, and the reason.
    """
    pieces: _PiecesOfParts = {}
    sharded: list[Tensor] = []
    numbers: Counter[str] = Counter()

    def leaf(part: str, path: Path, value: Any) -> Any:
        if not is_sharded(value):
            if is_placeholder(value):
                what = "a tensor on the meta device, which has no values to save: give it some before training."
                raise refused((part, *path), what)
            return value
        if (piece := _piece_of(part, path, value)) is not None:
            pieces.setdefault(part, {})[path] = piece
        numbers[part] += value.numel()
        sharded.append(value)
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def rebuilt(part: str, state: Any) -> Any:
        if not isinstance(part, str) or not part or not part.isprintable():
            raise CheckpointError(f"A part of a checkpoint is named by printable text, got {part!r}.")
        try:
            return rebuilt_with_paths(state, partial(leaf, part))
        except TooDeep as error:
            raise CheckpointError(f"The part {part!r} cannot be saved: {error}.") from None

    shared, local = ({part: rebuilt(part, state) for part, state in parts.items()} for parts in (shared, local))
    if sharded:
        local[PIECES] = pieces
    return shared, local, Shards(layout_of(sharded), numbers)


def _piece_of(part: str, path: Path, value: Any) -> tuple[list[int], Tensor] | None:
    """The piece that this rank writes of a sharded tensor, with its offset; None: it writes none."""
    try:
        region = region_of(value)
        if region is None and dist.get_rank() == 0:
            raise ValueError(f"rank 0 is not in its mesh {value.device_mesh}")
    except ValueError as error:
        raise CheckpointError(f"{part} cannot be saved: {dotted(path)} is sharded, and {error}.") from None
    if region is None or 0 in region.shape or not _writes(value):
        return None
    return list(region.offset), local_piece(value)


def _writes(tensor: Any) -> bool:
    """Whether this rank writes its piece, among the ranks that hold the same one.

    If several meshes each hold the whole tensor, as tensor parallel ranks do with unsplit parameters, the mesh of
    rank 0 writes it.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    first = all(
        at == 0 for at, placement in zip(mesh.get_coordinate(), placements, strict=True) if placement.is_replicate()
    )
    return first and 0 in mesh.mesh.flatten().tolist()


def is_placeholder(value: Any) -> bool:
    """Whether this is the placeholder of a tensor whose values are stored elsewhere."""
    return isinstance(value, Tensor) and value.is_meta


def add_pieces(found: FoundPieces, of_parts: _PiecesOfParts, verify: Callable[[], None]) -> None:
    """Add the pieces of one rank, the content of its part :data:`PIECES`."""
    for part, pieces in of_parts.items():
        for path, (offset, values) in pieces.items():
            region = Region(tuple(offset), tuple(values.shape))
            found.setdefault((part, path), []).append(Piece(region, values, verify))


def join(parts: Mapping[str, Any], pieces: FoundPieces) -> dict[str, Any]:
    """Replace each placeholder by a :class:`Sharded`.

    Args:
        parts: as returned by :func:`without_shards`.
        pieces: those of all ranks.

    Raises:
        ValueError: names a tensor of which pieces are missing.
    """

    def leaf(part: str, path: Path, value: Any) -> Any:
        if not is_placeholder(value):
            return value
        found = value.as_subclass(Sharded)
        found.pieces = pieces.get((part, path), [])
        _check_whole(f"{part} {dotted(path)}", tuple(value.shape), [piece.region for piece in found.pieces])
        return found

    return {
        part: rebuilt_with_paths(state, lambda path, value: leaf(part, path, value))  # noqa: B023
        for part, state in parts.items()
    }


def has_sharded(state: Any) -> bool:
    """Whether a nested state holds a DTensor or a :class:`Sharded`."""
    tensors = [value for _, value in walk(state) if isinstance(value, Tensor)]
    return any(is_sharded(value) or isinstance(value, Sharded) for value in tensors)


def fitted(state: Any, own: Any) -> Any:
    """A copy of ``state``, sharded as ``own`` is; only this rank's pieces are read.

    Args:
        state: a saved state, with whole tensors or :class:`Sharded` ones.
        own: the current state of the object that will load it. A tensor is sharded in the result if the one at the
            same path here is sharded and has the same shape; any other tensor is whole.

    Raises:
        CheckpointError: a file with a needed piece is damaged.
    """
    targets = {path: value for path, value in walk(own) if is_sharded(value)}
    return rebuilt_with_paths(state, lambda path, value: fitted_tensor(value, targets.get(path)))


def fitted_tensor(value: Any, target: Any) -> Any:
    """A copy of a saved tensor, sharded as ``target`` if that is sharded and has the same shape."""
    if not isinstance(value, Tensor) or is_sharded(value):
        return value
    if not is_sharded(target) or target.shape != value.shape:
        return value.read() if isinstance(value, Sharded) else value.clone()
    from torch.distributed.tensor import DTensor

    held, region = local_piece(target), region_of(target)
    if region is None or 0 in region.shape:
        piece = held.to(value.dtype)
    elif isinstance(value, Sharded):
        piece = _read(value, region)
    else:
        piece = value[region.slices].clone()
    return DTensor.from_local(
        piece.to(held.device),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def replicated(value: Tensor, like: Any) -> Any:
    """A whole tensor replicated on the mesh of ``like``."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(value.to(local_piece(like).device), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _read(saved: Sharded, region: Region) -> Tensor:
    exact = next((piece for piece in saved.pieces if piece.region == region), None)
    if exact is not None:  # with its strides: fused kernels give other bits for another memory layout
        exact.verify()
        return exact.values.clone()
    values = torch.empty(region.shape, dtype=saved.dtype)
    for piece in saved.pieces:
        target = values[piece.region.within(region)]
        if target.numel():
            piece.verify()
            target.copy_(piece.values[region.within(piece.region)])
    return values


def _check_whole(name: str, shape: Shape, regions: Sequence[Region]) -> None:
    """Refuse pieces that do not cover the whole tensor."""
    held, numbers = sum(math.prod(region.shape) for region in regions), math.prod(shape)
    if held < numbers:
        raise ValueError(f"{name} is not whole: its {len(regions)} pieces hold {held} of {numbers} numbers")
