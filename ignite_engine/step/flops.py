"""Floating-point operations of the code that runs between two calls, by torch's counter."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ignite_engine.ranks import agreement, mesh

# The work of each is much, and torch has no formula for it.
_WITHOUT_FORMULA = frozenset(
    {
        "_cudnn_rnn",
        "_cudnn_rnn_backward",
        "_grouped_mm",
        "_int_mm",
        "_scaled_grouped_mm",
        "_sparse_sparse_matmul",
        "_trilinear",
        "miopen_rnn",
        "miopen_rnn_backward",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
    }
)
_NAMESPACES = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "inductor"})
"""Those of torch; what any other operator computes is unknown."""


class FlopCount:
    """What the calls between :meth:`start` and :meth:`stop` compute, a product and a sum as two operations.

    Matrix products, convolutions and attention count, element-wise work does not. They run as they would without it, to
    the same bits, but slower. Attention counts the full square of its scores, though a causal kernel skips half.

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """

    def __init__(self) -> None:
        self.executed = 0
        """All of it."""
        self.recomputed = 0
        """The part that a backward pass computes again: activation checkpointing, and the scores of attention. The
        derivative of a derivative (``create_graph``) is counted here, too."""
        self.unknown: set[str] = set()
        """Operators of which the FLOPs are not known, and not in the count."""
        self._counter: FlopCounterMode | None = None

    def start(self) -> None:
        """Count from now on; nothing if it does already."""
        if self._counter is not None:
            return
        counter = FlopCounterMode(display=False)
        self._counter = counter
        counter.flop_registry = _Formulas(self, counter)
        counter.__enter__()

    def stop(self) -> None:
        """Count no more; nothing if it does not count."""
        if self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
            self.executed += counter.get_total_flops()


class _Formulas(dict[Any, Any]):
    """torch's formulas; notes what is recomputed, and operators without one."""

    def __init__(self, count: FlopCount, counter: FlopCounterMode) -> None:
        super().__init__()
        aten = torch.ops.aten
        given = dict(counter.flop_registry)
        # SDPA's kernel on CPU takes the same arguments first
        for direction in ("", "_backward"):
            on_gpu = getattr(aten, f"_scaled_dot_product_flash_attention{direction}")
            given.setdefault(getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{direction}"), given[on_gpu])
        given |= {aten.mm: _product, aten.mv: _product, aten.dot: _product, aten.vdot: _product}
        given |= {aten.addmm: _added_product, aten.addmv: _added_product, aten._sparse_addmm: _added_product}
        given[aten.convolution_backward] = _convolution_backward
        self._count = count
        for operator, formula in given.items():
            self[operator] = partial(self._flops, operator, formula, counter)

    def __contains__(self, operator: object) -> bool:
        if super().__contains__(operator):
            return True
        namespace, *names = str(operator).split(".")  # aten.mm, and of an overload aten.mm.default
        if names and (namespace not in _NAMESPACES or names[0] in _WITHOUT_FORMULA):
            self._count.unknown.add(f"{namespace}.{names[0]}")
        return False

    def _flops(
        self, operator: Any, formula: Callable[..., int], counter: FlopCounterMode, *args: Any, **kwargs: Any
    ) -> int:
        flops = int(formula(*args, **kwargs))
        if counter.mod_tracker.is_bw and torch.is_grad_enabled():
            self._count.recomputed += flops
        elif "attention" in str(operator) and "backward" in str(operator):
            self._count.recomputed += flops // 5  # one of five equal products: the scores
        return flops


def _product(first: Tensor, second: Tensor, **options: Any) -> int:
    """FLOPs of a product of two matrices or vectors; a sparse one counts the elements that it has."""
    if second.layout is not torch.strided:
        return 2 * first.shape[0] * int(second._nnz())
    elements = first.numel() if first.layout is torch.strided else int(first._nnz())
    return 2 * elements * (second.shape[1] if second.ndim == 2 else 1)


def _added_product(added: Tensor, first: Tensor, second: Tensor, **options: Any) -> int:
    return _product(first, second)


def _convolution_backward(
    grad_output: Tensor, inputs: Tensor, weight: Tensor, *arguments: Any, out_val: Any, **options: Any
) -> int:
    """Each of the two gradients takes as many products as the forward: torch's formula leaves out the groups.

    Args:
        arguments: the sizes of the bias, stride, padding, dilation, whether it is transposed, the output's padding,
            groups, and which gradients are computed.
    """
    transposed, computed = arguments[4], arguments[7]
    positions = (inputs if transposed else grad_output).shape[2:]
    forward = 2 * len(inputs) * math.prod(positions) * weight.numel()
    return forward * int(computed[0] + computed[1])


class CompiledCalls:
    """Whether code of torch.compile is called between :meth:`start` and :meth:`stop`, wherever it was compiled."""

    def __init__(self) -> None:
        self.found = False
        self._graphs = 0
        self._stop: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._graphs = _graphs_compiled()
        frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # where nothing was compiled it is not loaded
        if frames is None:
            return
        enter = frames._maybe_set_eval_frame  # which each compiled function calls, and without a callback to leave

        def noting(callback: Any) -> Any:
            self.found |= callback is not None
            return enter(callback)

        frames._maybe_set_eval_frame = noting
        self._stop = partial(setattr, frames, "_maybe_set_eval_frame", enter)

    def stop(self) -> None:
        """Look no more; nothing if it does not look."""
        stop, self._stop = self._stop, lambda: None
        stop()
        self.found |= _graphs_compiled() > self._graphs


def obstacle(update: Any, *, calls_compiled: bool = False) -> str | None:
    """Why the FLOPs of ``update`` cannot be counted, or not without changing what it computes; None: they can.

    Args:
        calls_compiled: it has called code of torch.compile, which may be in none of its parts.
    """
    model = getattr(update, "model", None)
    updates = [update, *getattr(update, "updates", {}).values()]
    parts = [*updates, *(getattr(member, "loss_fn", None) for member in updates)]
    parts += model.modules() if isinstance(model, nn.Module) else ()
    if calls_compiled or any(_is_compiled(part) for part in parts):
        # under the counter torch falls back to the eager code, to other bits
        return "torch.compile is in use, whose code the counter does not see"
    if mesh.data_size() < agreement.world_size():
        return "ranks share a model (tensor parallel), and the counter does not see which part is whose"
    return None


def _is_compiled(part: Any) -> bool:
    names = ("_orig_mod", "_compiled_call_impl") if isinstance(part, nn.Module) else ("_torchdynamo_orig_callable",)
    return any(getattr(part, name, None) is not None for name in names)


def _graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process, wherever it was called."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))
