"""The backward and the optimizer step without torch's wrappers around them, wherever they make no difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
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


def step(optimizer: Optimizer) -> None:
    """As ``optimizer.step()``.

    torch wraps every optimizer's step in a span for the profiler and two rounds of hooks, 8 us on an idle machine and
    29 us among the cache misses of a real step, profiler or not. Without a profiler, without hooks and without
    another's patch (an LR scheduler of torch puts one on the instance) the wrapped function itself is called. A private
    name of torch that is missing means ``optimizer.step()``.
    """
    hooked = type(optimizer).step
    if (
        _WRAPPER is None
        or getattr(hooked, "__code__", None) is not _WRAPPER
        or "step" in optimizer.__dict__
        or getattr(profiler, "_is_profiler_enabled", True)
        or getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or getattr(torch_optimizer, "_global_optimizer_pre_hooks", True)
        or getattr(torch_optimizer, "_global_optimizer_post_hooks", True)
    ):
        optimizer.step()
    else:
        hooked.__wrapped__(optimizer)  # type: ignore[attr-defined]  # functools.wraps put it there


def _nothing(*_: Any) -> None: ...


_wrap = getattr(Optimizer, "profile_hook_step", None)
_WRAPPER = getattr(_wrap(_nothing), "__code__", None) if callable(_wrap) else None
