"""What a run will do, before it does it: the text of ``trainer.describe()``.

Nothing that trains imports this room: ``Trainer.describe()`` and the recipe load it when they are asked.
"""

from __future__ import annotations

from ignite_engine.describe.text import describe

__all__ = ["describe"]
