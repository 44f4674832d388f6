"""The mean loss over a set, for tasks without an evaluation of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from ignite.metrics import Average, Metric
from torch import nn

from ignite_engine.devices import widest_float
from ignite_engine.loop.evaluator import eval_mode
from ignite_engine.update.losses import LossFn, parts
from ignite_engine.update.micro_batches import check_weight, first_dimension


def mean_loss(
    loss_fn: LossFn, weight_fn: Callable[[Any], int | float] | None = None
) -> tuple[Callable[[nn.Module, Any], Any], Mapping[str, Metric]]:
    """What ``create_evaluator`` takes to measure ``loss``.

    Args:
        loss_fn: the training loss; one that is a module is in eval mode meanwhile.
        weight_fn: the weight of a batch; None: its number of samples, the first dimension of its first tensor.

    Returns:
        ``predict`` and ``metrics``; the mean is exact on any number of ranks.
    """

    weigh = weight_fn or (lambda batch: 1 if (size := first_dimension(batch)) is None else size)

    def predict(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        with eval_mode(loss_fn) if isinstance(loss_fn, nn.Module) else nullcontext():
            result = loss_fn(model, batch)
        loss = parts(result)[0]
        weight = check_weight(weigh(batch))
        wide = loss.to(widest_float(loss.device))
        return wide * weight if weight else torch.zeros_like(wide), weight

    return predict, {"loss": Average(lambda output: output[0]) / Average(lambda output: output[1])}
