"""An optimizer's step without torch's wrapper around it, wherever that makes no difference."""

from __future__ import annotations

import inspect
from typing import Any

from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


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


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot be called without a closure that computes the loss again, as LBFGS's."""
    # of the class: an LR scheduler of torch patches the instance's with a function that names self
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind in positional and parameter.default is inspect.Parameter.empty for parameter in parameters
    )


def _nothing(*_: Any) -> None: ...


_wrap = getattr(Optimizer, "profile_hook_step", None)
_WRAPPER = getattr(_wrap(_nothing), "__code__", None) if callable(_wrap) else None
