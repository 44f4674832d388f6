"""Where a source is in its data: one immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Batch ``batch`` of pass ``pass_number`` is the next that is not consumed."""

    pass_number: int = 0
    batch: int = 0
    ended: bool = False
    """The pass was at its end when the place was saved: it yields nothing more."""
    skipped: int = 0
    """Samples at the start of the pass that another number of ranks consumed; batches are counted after them."""
    held: Mapping[str, Any] = MappingProxyType({})
    """What belongs to it beside its numbers, of a loader that is not at its place itself:

    - ``loader``: its own state, with ``generators``, those of its own random number generators
    - ``samplers``: states of the samplers of data without one, where the pass began; ``drawn_with``: the random numbers
      with which it began
    - ``exhausted``: this rank has no batch left, a peer has
    - ``between_passes``: the pass before has ended, and this one is not open yet; ``loader`` is the state at that end
    """

    @property
    def is_within(self) -> bool:
        """Some of the pass is consumed."""
        return self.batch > 0 or self.skipped > 0
