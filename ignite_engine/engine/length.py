"""How long a run will be, as far as that is known before it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Length:
    """The length of a run; None: it is not known before."""

    iterations: int | None
    epochs: int | None
    per_epoch: int | None

    @classmethod
    def of(cls, max_epochs: int | None, max_iters: int | None, per_epoch: int | None) -> Length:
        """From what ``run()`` is given, and the iterations of a pass over its data."""
        by_epochs = max_epochs * per_epoch if per_epoch and max_epochs else None
        if max_iters is None or (by_epochs is not None and by_epochs <= max_iters):
            return cls(by_epochs, max_epochs, per_epoch)
        return cls(max_iters, max_iters // per_epoch if per_epoch else max_epochs, per_epoch)

    def __str__(self) -> str:
        if self.iterations is None:
            return f"{self.epochs:,} epochs" if self.epochs else "a run whose length is not known before"
        epochs = f", {self.epochs:,} epochs of {self.per_epoch:,}" if self.epochs and self.per_epoch else ""
        return f"{self.iterations:,} iterations{epochs}"
