"""Norm and clipping of gradients: dense, sparse and sharded ones together, without a host sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The joint L2 norm of ``gradients``, bit-equal to ``torch.nn.utils.get_total_norm`` where torch has one.

    Sparse gradients count by their coalesced values (an index twice in the batch is one row); sharded ones
    (DTensor) by the whole tensor, which is one collective for each device mesh.

    Returns:
        Shape ``()``, on the first gradient's device, in the widest dtype; zero on the CPU when there is none.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(_values(gradient))
    norms: list[Any] = [get_total_norm(alike) for alike in by_mesh.values() or [[]]]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    joint: Tensor = norms[0] if len(norms) == 1 else get_total_norm([norm.to(gradients[0].device) for norm in norms])
    return joint


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
    # on the CPU the norm is read at no cost, and multiplying by 1 costs as much as the norm; a NaN is below nothing
    if norm.device.type == "cpu" and norm.item() + 1e-5 <= max_norm:
        return norm
    for alike in by_mesh.values():  # torch's foreach takes no mix of them
        clip_grads_with_norm_(alike, max_norm, norm)
    for gradient in sparse:
        values = gradient.values()
        values.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0).to(values.device))
    return norm


def _values(gradient: Tensor) -> Tensor:
    if not gradient.is_sparse:
        return gradient
    return (gradient if gradient.is_coalesced() else gradient.coalesce()).values()
