"""What an iteration is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grouping:
    """What an iteration is made of."""

    accumulation_steps: int | None = None
    global_micro_batches: int | None = None

    def __str__(self) -> str:
        sizes = ((name, getattr(self, name)) for name in ("accumulation_steps", "global_micro_batches"))
        return ", ".join(f"{name}={size}" for name, size in sizes if size) or "no grouping"
