"""What one iteration of a run was: its samples, losses and rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from ignite_engine.states.model_and_optimizer import weights_of
from ignite_engine.trainer import Trainer


@dataclass
class Iteration:
    """One iteration on this rank.

    Attributes:
        samples: for each micro-batch the indices of its samples in the training set; None: the data is not map-style,
            or its loader has an order of its own.
        output: the scalars of ``state.output``, such as ``loss`` and ``grad_norm``.
        rates: learning rates of the update, by optimizer and group.
    """

    number: int
    epoch: int
    samples: list[list[int]] | None = None
    output: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people; numbers in full."""
        lines = [f"iteration {self.number}, epoch {self.epoch}"]
        if self.samples is None:
            lines.append("  samples: not known, as the order of the data is its own")
        else:
            groups = [" ".join(map(str, samples)) for samples in self.samples]
            lines.append(f"  samples: {' | '.join(groups)}")
        lines += [f"  {name}: {value!r}" for name, value in self.output.items()]
        return lines + [f"  {name}: {rate!r}" for name, rate in self.rates.items()]


def samples_of(trainer: Trainer) -> list[list[int]] | None:
    """Within an iteration, before it is consumed: the indices of this rank's samples by micro-batch; None: unknown."""
    source = trainer.progress.source
    sampler = None if source is None else source.sampler
    if source is None or sampler is None or trainer.state.group.unread:
        return None
    count = len(trainer.state.group.real)
    size: int = source.data.batch_size
    before = sampler.start
    # the loader has an iterator of its own; this one reads the order again
    sampler.start = source.place.batch * size
    try:
        indices = [index for _, index in islice(iter(sampler), count * size)]
    finally:
        sampler.start = before
    return [indices[first : first + size] for first in range(0, len(indices), size)]


def scalars_of(output: Any) -> dict[str, float]:
    """The numbers of an update's output by name."""
    named = output.items() if isinstance(output, Mapping) else [("loss", output)]
    return {
        name: float(value)
        for name, value in named
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def rates_of(trainer: Trainer) -> dict[str, float]:
    """The learning rate of each group of each optimizer, now."""
    rates: dict[str, float] = {}
    optimizers = trainer.update.optimizers
    for name, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            parts = ["lr"] if name == "optimizer" else ["lr", name]
            parts += [str(group.get("name", number))] if len(optimizer.param_groups) > 1 else []
            rates["/".join(parts)] = float(group["lr"])
    return rates


def weights_now(trainer: Trainer) -> dict[str, Tensor]:
    """Each tensor of the weights by its name in a checkpoint; of a sharded one this rank's shard."""
    weights = weights_of(trainer.registry.objects, trainer.registry.kinds)
    return {name: local(value) for name, value in weights.items()}


def local(value: Tensor) -> Tensor:
    """Of a sharded tensor this rank's shard."""
    plain: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return plain.detach()
