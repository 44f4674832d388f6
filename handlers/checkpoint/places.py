"""Where else than in its folder the state of a run is kept: each place is asked by the same few calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ignite_engine.checkpointing import CheckpointInfo
from ignite_engine.checkpointing.store import Checkpoints

if TYPE_CHECKING:
    from ignite_engine.handlers.checkpoint.saver import Saver
    from ignite_engine.trainer import Trainer


class OtherPlace(Protocol):
    """A second place of a run's state. What it keeps, and when, is its own: it listens to the events that it needs.

    All of these are collectives.
    """

    replayed: bool = False

    def attach(self, trainer: Trainer) -> None:
        """Listen to the run, after the checkpoint handler does.

        Raises:
            ValueError: one line; the place cannot be used.
        """

    def check_new(self) -> None:
        """Refuse what an earlier run has left.

        Raises:
            CheckpointError: one line; there is something.
        """

    def in_front_of(self, store: Checkpoints) -> Checkpoints:
        """What a resume loads from: the store, with what is newer here, or has been brought into it from here."""

    def resumed(self, found: CheckpointInfo | None) -> str | None:
        """A run was resumed from this, or begins fresh. Returns the name of the place, if this came from it."""

    def begin(self, trainer: Trainer) -> None:
        """A run begins, and holds its folder."""

    def end(self, trainer: Trainer) -> None:
        """A run is over, or is left to go back to a checkpoint; it still holds its folder."""


def places_of(saver: Saver, metrics_of: Callable[[Trainer], dict[str, float] | None]) -> list[OtherPlace]:
    """Those that the options of a saver ask for; none else is imported.

    Args:
        metrics_of: what was measured at this step boundary.
    """
    places: list[OtherPlace] = []
    if saver.options.memory is not None:
        from ignite_engine.ext.recovery.copies import MemoryCopies

        places.append(MemoryCopies(saver, metrics_of))
    if saver.options.mirror is not None:
        from ignite_engine.handlers.checkpoint.mirroring import Mirroring

        places.append(Mirroring(saver.options, saver.store.directory))
    return places
