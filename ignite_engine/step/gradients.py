"""Norm and clipping of gradients: dense, sparse and sharded ones together, without a host sync."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ignite_engine.step.losses import whole


class _Gradient(NamedTuple):
    """Stands in for a parameter, as torch clips the ``grad`` of what it is given."""

    grad: Any


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their joint L2 norm is at most ``max_norm``; None: leave them as they are.

    The bits are those of ``torch.nn.utils.clip_grad_norm_``, which refuses sparse gradients and several device meshes.
    Sparse ones count by their coalesced values, as an index twice in the batch is one row, and are coalesced in place
    where they are scaled; sharded ones (DTensor) count by the whole tensor, which is a collective.

    Args:
        parameters: those without a gradient are ignored.
        max_norm: in the units of the unscaled loss; call after ``scaler.unscale_``.

    Returns:
        The norm before clipping, shape ``()``, on the gradients' device, in the widest dtype (no host sync); zero on
        the CPU where there is none.

    Raises:
        ValueError: ``max_norm`` is not positive.

    Source: Pascanu et al. 2013, arXiv 1211.5063, section 3.2.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}.")
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            if max_norm is not None:
                parameter.grad = gradient
            gradient = gradient.values()
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [whole(get_total_norm(gradients)) for gradients in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else get_total_norm(norms)
    if max_norm is not None:
        for gradients in by_mesh.values():  # torch's foreach takes no mix of them
            stand_ins: list[Any] = list(map(_Gradient, gradients))
            clip_grads_with_norm_(stand_ins, max_norm, norm)
    return norm
