"""What saving and loading took, for the log and the summary of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ignite_engine.checkpoint.manifest import Manifest
from ignite_engine.text import in_units


@dataclass(frozen=True)
class Transfer:
    """A checkpoint written or read, by all ranks together: until the slowest of them had done its part."""

    bytes: int
    seconds: float

    @classmethod
    def of(cls, manifest: Manifest, seconds: float) -> Transfer:
        """The transfer of a checkpoint that was read, with the files that it needs of other checkpoints."""
        return cls(sum(file.bytes for file in manifest.files.values()), seconds)

    def __str__(self) -> str:
        return (
            f"{in_units(self.bytes)} in {self.seconds:.3g} s, {in_units(round(self.bytes / max(self.seconds, 1e-9)))}/s"
        )


@dataclass
class Times:
    """What one process spent on checkpoints. A transfer is the last one of its kind; None: there was none."""

    saves: int = 0
    """How many were committed."""
    saved: Transfer | None = None
    """From the step boundary to the commit."""
    loaded: Transfer | None = None
    """From the choice of the checkpoint, with its verification, to the states that are loaded."""
    waited_s: float = 0.0
    """Seconds for which training waited for saves, all together."""
    _waiting: int = field(default=0, repr=False)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What training waits for; a wait within another one counts once."""
        began, self._waiting = time.perf_counter(), self._waiting + 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.waited_s += time.perf_counter() - began

    def as_dict(self) -> dict[str, float]:
        """For ``summary.json``."""
        values: dict[str, float] = {"saves": self.saves, "waited_s": self.waited_s}
        for name, transfer in (("save", self.saved), ("load", self.loaded)):
            if transfer is not None:
                values |= {f"{name}_s": transfer.seconds, f"{name}_bytes": transfer.bytes}
                values[f"{name}_bytes_per_s"] = round(transfer.bytes / transfer.seconds)
        return values
