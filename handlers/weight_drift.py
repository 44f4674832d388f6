"""Whether all ranks still hold the same weights: a hash of each tensor, compared at an event."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_engine import Phase, Trainer
from ignite_engine.checkpointing.digests import hashes
from ignite_engine.errors import RanksDiffer
from ignite_engine.ranks import agreement
from ignite_engine.states.model_and_optimizer import ModelState, OptimizerState, named_parameters
from ignite_engine.states.trained import trained_parameters

logger = logging.getLogger(__name__)


class WeightDrift:
    """Compare the parameters of all ranks bit by bit; where they have drifted apart the run ends, or a line says so.

    Compared are the models' and whatever else an optimizer trains, such as those of a loss function.

    Args:
        optimizers: compare the state of the optimizers, too.
        on_drift: ``raise`` ends the run on all ranks; ``warn`` logs it once and training continues.

    Tensors are not copied, and one number for each way of sharding is exchanged, blocking. Sharded
    tensors (DTensor) are compared between ranks that hold the same shard. Buffers are not compared: BatchNorm's differ
    between ranks under DDP. On one process it does nothing.

    Raises:
        ValueError: ``on_drift`` is neither.
    """

    phase = Phase.MEASURE
    replayed = True

    def __init__(self, *, optimizers: bool = False, on_drift: str = "raise") -> None:
        if on_drift not in ("raise", "warn"):
            raise ValueError(f"on_drift must be 'raise' or 'warn', got {on_drift!r}.")
        self.optimizers, self.on_drift = optimizers, on_drift
        self._warned = False

    def attach(self, trainer: Trainer, event: Any = None) -> None:
        """Compare at ``event``, by default every 500 iterations."""
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=500) if event is None else event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Compare now; a collective.

        Raises:
            RanksDiffer: they are not the same, on all ranks; unless it is to warn.
        """
        if agreement.world_size() == 1:
            return
        shards = list(_shards(trainer, self.optimizers))
        found = hashes([shard.tensor for shard in shards])
        if not _differ(agreement.gather_objects(_totals(shards, found))):
            return
        message = _difference_message(trainer.state.iteration, shards, found)
        if self.on_drift == "raise":
            raise RanksDiffer(message)
        if not self._warned and agreement.rank() == 0:
            logger.warning("%s", message)
        self._warned = True


class _Shard(NamedTuple):
    """This rank's part of a tensor."""

    name: str
    part: str
    """Names the part; ranks on which the name is the same hold the same part, and are compared."""
    tensor: Tensor


def _shards(trainer: Trainer, optimizers: bool) -> Iterator[_Shard]:
    names: dict[int, str] = {}
    for obj in trainer.registry.objects.values():
        model = obj.model if isinstance(obj, ModelState) else obj
        if isinstance(model, nn.Module):
            for name, parameter in named_parameters(model):
                names[id(parameter)] = name
                yield _shard_of(name, parameter)
    for trained in trained_parameters(trainer.registry.objects):  # those outside of the models, of a loss function say
        if id(trained.parameter) not in names:
            names[id(trained.parameter)] = trained.name
            yield _shard_of(trained.name, trained.parameter)
    for label, obj in trainer.registry.objects.items():
        if optimizers and isinstance(obj, OptimizerState):
            for number, (owner, state) in enumerate(obj.optimizer.state.items()):
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        yield _shard_of(f"{label}/{names.get(id(owner), number)}/{key}", value)


def _shard_of(name: str, tensor: Any) -> _Shard:
    tensor = tensor.detach()
    if not hasattr(tensor, "to_local"):
        return _Shard(name, "", tensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    place = [index for index, placement in zip(mesh.get_coordinate(), placements, strict=True) if placement.is_shard()]
    return _Shard(name, f"{mesh.mesh.tolist()} {placements} {place}", tensor.to_local())


def _totals(shards: list[_Shard], found: Tensor) -> dict[str, int]:
    """One number for each part that this rank holds; the device is read once."""
    parts = list(dict.fromkeys(shard.part for shard in shards))
    totals = [
        sum(
            (2 * n + 1) * value
            for n, (shard, value) in enumerate(zip(shards, found, strict=True))
            if shard.part == part
        )
        for part in parts
    ]
    return dict(zip(parts, torch.stack(totals).tolist(), strict=True)) if totals else {}


def _differ(rows: list[dict[str, int]]) -> bool:
    parts = {part for row in rows for part in row}
    return any(len({row[part] for row in rows if part in row}) > 1 for part in parts)


def _difference_message(iteration: int, shards: list[_Shard], hashes: Tensor) -> str:
    """The first tensor that differs, on which ranks, and by how much; a collective."""
    found = {(shard.name, shard.part): (int(value), shard.tensor) for shard, value in zip(shards, hashes, strict=True)}
    rows = agreement.gather_objects({place: value for place, (value, _) in found.items()})
    places = list(dict.fromkeys(place for row in rows for place in row))
    apart = [place for place in places if len({row[place] for row in rows if place in row}) > 1]
    if not apart:
        return f"The ranks hold parameters of other names or in another order at iteration {iteration}."
    place = apart[0]
    values = {rank: row[place] for rank, row in enumerate(rows) if place in row}
    usual = max(values, key=lambda rank: (list(values.values()).count(values[rank]), -rank))  # the first of the most
    others = [rank for rank, value in values.items() if value != values[usual]]
    difference = _largest_difference(found[place][1] if place in found else None, usual)
    count = len({name for name, _ in apart})
    return (
        f"The ranks hold different weights at iteration {iteration}: {place[0]}{agreement.on_ranks(others)} differs "
        f"from rank {usual}'s by up to {max(difference[rank] for rank in others):g} ({count} of "
        f"{len({name for name, _ in places})} tensors differ). All must start alike and change by reduced gradients "
        "only: look for a step, a clipping or a loading of weights that ranks do differently."
    )


def _largest_difference(tensor: Tensor | None, source: int) -> list[float]:
    """The largest absolute difference of each rank's tensor from that of rank ``source``; a collective."""
    mine = None if tensor is None else tensor.cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
    (reference,) = agreement.gather_objects(mine)[source : source + 1]
    largest = 0.0 if mine is None or reference is None else float((mine - reference).abs().max())
    return [row[0] for row in agreement.gather_floats([largest])]
