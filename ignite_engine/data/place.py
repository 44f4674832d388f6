"""Where a source is in its data: one immutable value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Held:
    """What belongs to a place beside its numbers, of a loader whose order is not ours."""

    loader: Any = None
    """The loader's own state; None: it has none, or it is at its place itself."""
    generators: Any = None
    """States of the loader's own random number generators (``own_state.generators_of``)."""
    exhausted: bool = False
    """This rank has no batch left, a peer has."""
    between_passes: bool = False
    """The pass before has ended, and this one is not open yet; ``loader`` is the state at that end."""


class Place(NamedTuple):
    """Batch ``batch`` of pass ``pass_number`` is the next that is not consumed."""

    pass_number: int = 0
    batch: int = 0
    ended: bool = False
    """The pass was at its end when the place was saved: it yields nothing more."""
    skipped: int = 0
    """Samples at the start of the pass that another number of ranks consumed; batches are counted after them."""
    held: Held = Held()

    @property
    def was_open_when_saved(self) -> bool:
        """The pass was begun before the place was saved: what opening it draws was drawn then."""
        loaded = self.held.loader is not None and not self.held.between_passes
        return self.batch > 0 or self.skipped > 0 or loaded

    def next_pass(self) -> Place:
        """The first batch of the next pass."""
        # a pass that was not opened since its place was loaded: the loader's state is still the loaded one, at its end
        held = Held(self.held.loader, self.held.generators, between_passes=True)
        return Place(self.pass_number + 1, held=held)
