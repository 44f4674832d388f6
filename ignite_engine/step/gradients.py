"""Norm and clipping of gradients: dense, sparse and sharded ones together, without a host sync."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_FP32_EPS = torch.finfo(torch.float32).eps


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The joint L2 norm of ``gradients``, bit-equal to ``torch.nn.utils.get_total_norm`` where none is sharded.

    Sparse gradients count by their coalesced values (an index twice in the batch is one row); sharded ones
    (DTensor) by the whole tensor, which is one collective for each device mesh, whatever their number.

    Returns:
        Shape ``()``, on the first gradient's device, in the widest dtype; zero on the CPU when there is none.
    """
    by_mesh: dict[Any, list[Any]] = {}
    for gradient in gradients:
        mesh = getattr(gradient, "device_mesh", None)
        by_mesh.setdefault(mesh, []).append(_values(gradient) if mesh is None else _without_parts(gradient))
    whole = by_mesh.pop(None, [])
    if not by_mesh:
        return get_total_norm(whole, foreach=True if _are_plain(whole) else None)
    norms = [get_total_norm(whole)] if whole else []
    norms += [_norm_over_mesh(mesh, sharded) for mesh, sharded in by_mesh.items()]
    return norms[0] if len(norms) == 1 else get_total_norm([norm.to(gradients[0].device) for norm in norms])


def _norm_over_mesh(mesh: DeviceMesh, gradients: Sequence[Any]) -> Tensor:
    """The joint norm of DTensors of one mesh: each rank sums up its shards, and a replica counts on its first rank."""
    place = mesh.get_coordinate()
    assert place is not None
    dims = [
        dim for dim in range(mesh.ndim) if any(not gradient.placements[dim].is_replicate() for gradient in gradients)
    ]
    groups: list[Any] = [mesh.get_group(dim) for dim in dims]
    if len(dims) > 1 and mesh.size() == dist.get_world_size():
        dims, groups = list(range(mesh.ndim)), [None]  # the world's group
    counted = [
        gradient.to_local()
        for gradient in gradients
        if all(place[dim] == 0 or not gradient.placements[dim].is_replicate() for dim in dims)
    ]
    # the same dtype on every rank, whatever it counts; in fp16 the square of 256 would overflow
    widest = reduce(torch.promote_types, (gradient.dtype for gradient in gradients))
    squared = get_total_norm(counted).to(gradients[0].device, torch.float64).square()
    for group in groups:
        dist.all_reduce(squared, group=group)
    return squared.sqrt().to(widest)


def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint L2 norm is at most ``max_norm``.

    The bits are those of ``torch.nn.utils.clip_grad_norm_``, which refuses sparse gradients.

    Args:
        parameters: those without a gradient are ignored; sparse gradients are coalesced in place.
        max_norm: in the units of the unscaled loss; call after ``scaler.unscale_``.

    Returns:
        The norm before clipping, shape ``()``, on the gradients' device (no host sync).

    Raises:
        ValueError: ``max_norm`` is not positive.

    Source: Pascanu et al. 2013, arXiv 1211.5063, section 3.2.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}.")
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    if _are_plain(gradients):
        return _clip_plain(gradients, max_norm)
    sparse: list[Tensor] = []
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            parameter.grad = gradient.coalesce()
            sparse.append(parameter.grad)
        else:
            by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(parameter)
    norm = gradient_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    for alike in by_mesh.values():  # torch's foreach takes no mix of them
        clip_grads_with_norm_(alike, max_norm, norm)
    for gradient in sparse:
        values = gradient.values()
        values.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0).to(values.device))
    return norm


def _are_plain(gradients: Sequence[Tensor]) -> bool:
    """Whether all are dense fp32 tensors on the CPU, whose norm is read at no cost."""
    return bool(gradients) and all(
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.dtype is torch.float32
        and gradient.layout is torch.strided
        and not gradient.requires_grad
        for gradient in gradients
    )


def _clip_plain(gradients: list[Tensor], max_norm: float) -> Tensor:
    """As :func:`clip_gradients`, whose norm is read here at no cost."""
    # as torch's get_total_norm, which first groups them by device and dtype
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    # torch's factor is 1, as its reciprocal is rounded by so much where the two are nearly equal; False for NaN
    is_below = norm.item() * (1.0 + 2.0 * _FP32_EPS) + 1e-5 <= max_norm
    if not is_below:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp_(max=1.0))
    return norm


def check_tables(model: nn.Module) -> None:
    """Refuse tables that are sharded (FSDP2) and have sparse gradients, which torch cannot reduce.

    Raises:
        ValueError: there is one.
    """
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_table and module.sparse and hasattr(module.weight, "device_mesh"):
            raise ValueError(
                f"{name} ({type(module).__name__}) has sparse gradients, which FSDP2 cannot reduce: use "
                "sparse=False or DistributedDataParallel."
            )


def _without_parts(gradient: Any) -> Any:
    """The DTensor with its partial sums made, as squares are not additive."""
    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    from torch.distributed.tensor import Replicate

    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])


def _values(gradient: Tensor) -> Tensor:
    if not gradient.is_sparse:
        return gradient
    return (gradient if gradient.is_coalesced() else gradient.coalesce()).values()
