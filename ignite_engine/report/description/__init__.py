"""What a run will do, before it does it: ``trainer.describe()``, and the conflicts that are logged when it starts."""

from __future__ import annotations

from ignite_engine.engine.length import Length
from ignite_engine.report.description.conflicts import Conflict, conflicts_of
from ignite_engine.report.description.text import describe

__all__ = ["Conflict", "Length", "conflicts_of", "describe"]
