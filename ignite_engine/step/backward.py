"""The backward pass without torch's checks of its arguments, wherever they make no difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary


def backward(loss: Tensor, gradient: Tensor) -> None:
    """As ``loss.backward(gradient)``, for a gradient of the loss's shape, dtype and device.

    ``Tensor.backward`` prepares the same call of the autograd engine for any tensors, subclasses and nested tensors,
    which takes about 40 us among the cache misses of a real step. A tensor subclass such as DTensor, a function mode
    and a functorch transform get torch's own, and so does a torch without one of the private names.
    """
    if (
        _run is None
        or type(loss) is not Tensor
        or has_torch_function_unary(loss)  # also within a function mode
        or _inside_functorch()
    ):
        loss.backward(gradient)
    else:
        _run((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


_inside_functorch: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
_run: Any = getattr(torch.autograd.graph, "_engine_run_backward", None) if callable(_inside_functorch) else None
