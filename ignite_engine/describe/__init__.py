"""What a run will do, before it does it: the text of ``trainer.describe()``, and settings that contradict each other.

Nothing that trains imports this room: ``Trainer.describe()`` and the recipe load it when they are asked.
"""

from __future__ import annotations

from ignite_engine.describe.conflicts import Conflict, conflicts_of, schedule_conflicts
from ignite_engine.describe.text import describe

__all__ = ["Conflict", "conflicts_of", "describe", "schedule_conflicts"]
