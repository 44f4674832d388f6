"""Facts that a supervisor gives to the ranks that it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """What a supervisor tells the ranks that it starts.

    Attributes:
        reason: why they are started again, in one line; None: they are not.
        is_known: an attempt before it has trained with the same settings and code on as many ranks: what it has said
            of them, and written into the run's folder, holds.
    """

    reason: str | None = None
    is_known: bool = False


current = Attempt()
"""The attempt of this process."""
