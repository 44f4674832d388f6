"""Digests of the weights every so many updates, by which a moment or a run is compared with another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ignite.engine import Engine
from torch import Tensor

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.checkpoint.digests import HASH, hashes
from ignite_engine.checkpoint.states.model_and_optimizer import weights_of
from ignite_engine.checkpoint.states.rank_digests import different_names
from ignite_engine.errors import RanksDiffer, is_whole
from ignite_engine.events import Phase
from ignite_engine.handlers.log import Log
from ignite_engine.ranks import agreement

Digests = Mapping[str, Any]


class DigestTrail:
    """Write a digest of each tensor of the weights, and one of all, to ``trail.jsonl`` in the run's folder.

    A line is ``{"iteration": 100, "all": "5f0c...", "hash": "sums64-1", "weights": {"head.weight": "a81e...", ...}}``:
    64 bits of each parameter and saved buffer of the registered models, as they are at the boundary. ``hash`` names
    the function; lines of another one are not compared. Other bits, or an exchange of elements, give another digest.
    It is no cryptographic hash: who wants to can make other weights with the same one.

    Args:
        directory: of the run.
        every: updates from one line to the next.
        compare_ranks: end the run on all ranks where they have different weights.

    The device is read once. On several ranks rank 0 writes its own weights; of sharded tensors
    (DTensor) each rank reads its shard, and the digest is that of all. A resumed run writes no line twice. Nothing is
    saved, drawn or changed, so the bits of the run are those without it. An error in writing is logged once, and the
    training continues.

    Raises:
        ValueError: ``every`` is below 1.
        RanksDiffer: with ``compare_ranks``, in the run.
    """

    phase = Phase.LAST

    def __init__(self, directory: str | Path, *, every: int = 100, compare_ranks: bool = False) -> None:
        if not is_whole(every) or every < 1:
            raise ValueError(f"every must be a whole number of updates of at least 1, got {every!r}.")
        self.every, self.compare_ranks = every, compare_ranks
        self._log = Log(Path(directory) / "trail.jsonl")

    def attach(self, engine: Engine, event: Any = None) -> None:
        """Write at ``event``, by default the step boundary of every ``every``-th update."""
        trainer = Trainer.of(engine)
        trainer.add_event_handler(TrainingEvents.RESUME_POINT(every=self.every) if event is None else event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Write a line now; a collective where weights are sharded, or ranks compared."""
        compared = trainer.registry.rank_digests if self.compare_ranks else None
        if compared is not None and (names := different_names(compared.tensors())):
            raise RanksDiffer(
                f"The ranks have different weights at iteration {trainer.state.iteration}: {names[0]} is the first of "
                f"{len(names)} tensors. All must start alike and change by reduced gradients only: look for a step, a "
                "clipping or a loading of weights that ranks do differently."
            )
        if (digests := digests_of(trainer)) is not None:
            self._log.write({"iteration": trainer.state.iteration, **digests})


def digests_of(trainer: Trainer) -> Digests | None:
    """The digests of the weights now; None on a rank that has nothing to write. A collective where they are sharded."""
    tensors = weights_of(trainer.registry.objects, trainer.registry.kinds)
    sharded = any(hasattr(tensor, "to_local") for tensor in tensors.values())
    if agreement.rank() and not sharded:
        return None
    numbers: list[int] = hashes([_local(tensor) for tensor in tensors.values()]).tolist()
    if sharded:
        rows = agreement.gather_objects(numbers)
        numbers = [sum((2 * rank + 1) * number for rank, number in enumerate(column)) for column in zip(*rows)]
    total = sum((2 * place + 1) * number for place, number in enumerate(numbers))
    weights = {name: _hex(number) for name, number in zip(tensors, numbers)}
    return {"hash": HASH, "all": _hex(total), "weights": weights}


def _local(tensor: Any) -> Tensor:
    value: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return value


def _hex(number: int) -> str:
    return f"{number % 2**64:016x}"
