"""Accumulation again, with smaller micro-batches, where one does not fit into the memory of one process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_engine.ranks import agreement
from ignite_engine.step import out_of_memory
from ignite_engine.step.accumulate.forward_backward import Accumulate
from ignite_engine.step.device import device_of
from ignite_engine.step.micro_batches import WeightFn
from ignite_engine.step.parameters import Parameters

logger = logging.getLogger(__name__)


def accumulate_in_memory(
    accumulate: Accumulate,
    engine: Engine,
    micro_batches: Sequence[Any],
    scales: list[float],
    *,
    model: nn.Module,
    parameters: Parameters,
    weight_fn: WeightFn | None,
    splits: bool,
) -> dict[str, Tensor]:
    """What ``accumulate`` returns; ``state.micro_batch_limit`` is the number of samples above which it is given parts.

    Args:
        splits: else micro-batches stay whole.

    Raises:
        torch.OutOfMemoryError: a micro-batch does not fit and is not split.
    """
    state: Any = engine.state
    before, counted = out_of_memory.Generators(device_of(model)), state.micro_batches
    while True:
        pieces, shares = micro_batches, scales
        if state.micro_batch_limit is not None and splits:
            pieces, shares = out_of_memory.split(micro_batches, scales, state.micro_batch_limit, weight_fn)
        try:
            return accumulate(engine, pieces, shares)
        except torch.OutOfMemoryError as error:
            batch = pieces[state.micro_batches - counted]
            limit = out_of_memory.halved(batch) if splits and agreement.world_size() == 1 else None
            if limit is None:
                raise out_of_memory.refusal(error, batch, state.iteration) from error
            logger.warning("%s", out_of_memory.report(batch, limit, state.iteration, model))
        # here the error is gone, and with it what its frames have held
        state.micro_batch_limit, state.micro_batches = limit, counted
        parameters.clear_gradients()
        del batch, pieces
        out_of_memory.free()
        before.restore()
