"""Adagrad with one accumulator for each row of a parameter, for large embedding tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class RowwiseAdagrad(Optimizer):
    """Adagrad whose accumulator holds one number for each row (index of dimension 0) instead of one for each weight.

    For each row ``i`` with gradient ``g[i]``::

        sum[i] += mean(g[i] ** 2)
        weight[i] -= lr * g[i] / (sqrt(sum[i]) + eps)

    Sparse gradients (``nn.Embedding(sparse=True)``) change the rows that they hold and no other, at a cost that does
    not depend on the size of the table; dense ones change the same rows alike, as a row of zeros changes nothing. The
    accumulator, ``sum`` in the state, is float32 (float64 for a float64 parameter), of shape ``(rows,)``.

    Args:
        params: parameters, or groups of them, of at least one dimension.
        lr: at least 0.
        initial_accumulator: what ``sum`` begins with, at least 0.
        eps: above 0.

    Raises:
        ValueError: a value is out of its range, or a parameter has no rows.

    Source: the "exact row-wise Adagrad" of FBGEMM and TorchRec; Duchi et al. 2011, JMLR 12, for Adagrad itself.
    """

    def __init__(self, params: Any, lr: float = 1e-2, *, initial_accumulator: float = 0.0, eps: float = 1e-8) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be at least 0, got {lr}.")
        if not initial_accumulator >= 0:
            raise ValueError(f"initial_accumulator must be at least 0, got {initial_accumulator}.")
        if not eps > 0:
            raise ValueError(f"eps must be above 0, or a row without a gradient becomes 0 / 0, got {eps}.")
        super().__init__(params, {"lr": lr, "initial_accumulator": initial_accumulator, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if any(not parameter.dim() for parameter in self.param_groups[-1]["params"]):
            raise ValueError("RowwiseAdagrad needs parameters with rows, got one without a dimension.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        sums = self._sums(parameter, group)
        if gradient.is_sparse and gradient.sparse_dim() > 1:
            gradient = gradient.to_dense()
        if not gradient.is_sparse:
            sums.add_(_mean_square(gradient, sums.dtype))
            parameter.sub_(_scaled(gradient, sums, group))
            return
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        own = sums[rows] + _mean_square(values, sums.dtype)
        sums[rows] = own
        parameter.index_add_(0, rows, _scaled(values, own, group), alpha=-1)

    def _sums(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if "sum" not in state:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            state["sum"] = torch.full(
                parameter.shape[:1], group["initial_accumulator"], dtype=dtype, device=parameter.device
            )
        sums: Tensor = state["sum"]
        return sums


def _mean_square(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean of the squares of each row, shape ``(rows,)``."""
    squares = rows.to(dtype).square()
    return squares.mean(tuple(range(1, rows.dim()))) if rows.dim() > 1 else squares


def _scaled(rows: Tensor, sums: Tensor, group: dict[str, Any]) -> Tensor:
    factors: Tensor = group["lr"] / (sums.sqrt() + group["eps"])
    return (rows * factors.reshape(-1, *[1] * (rows.dim() - 1))).to(rows.dtype)
