"""What an iteration is made of: as the Trainer was built, now, and from the next pass over the data on."""

from __future__ import annotations

from dataclasses import dataclass

from ignite_engine.step.micro_batches import check_steps


@dataclass(frozen=True)
class Grouping:
    """What an iteration is made of."""

    accumulation_steps: int | None = None
    global_micro_batches: int | None = None

    def __str__(self) -> str:
        sizes = ((name, getattr(self, name)) for name in ("accumulation_steps", "global_micro_batches"))
        return ", ".join(f"{name}={size}" for name, size in sizes if size) or "no grouping"


class Groupings:
    """The grouping of a run, which may change its accumulation.

    Args:
        built: as the Trainer was built.
    """

    def __init__(self, built: Grouping) -> None:
        self.built = self.now = built
        self.next_steps: int | None = None
        """What ``accumulation_steps`` changes to with the next pass."""

    @property
    def changed(self) -> bool:
        """The run has changed its accumulation itself, or will."""
        return self.next_steps is not None or self.now != self.built

    def change_accumulation(self, steps: int, *, running: bool) -> None:
        """Group other numbers of batches from the next pass over the data on, or, before a run, in all of it.

        Raises:
            ValueError: it is below 1, or batches are not grouped by it.
        """
        check_steps(steps, "accumulation_steps")
        if self.now.accumulation_steps is None:
            how = "global_micro_batches" if self.now.global_micro_batches is not None else "no grouping"
            raise ValueError(
                f"accumulation_steps can change in a Trainer that was made with some, and this one has {how}: make it "
                "Trainer(update, accumulation_steps=1)."
            )
        if running:
            self.next_steps = steps
        else:
            self.built = self.now = Grouping(steps)

    def begin(self, grouping: Grouping, *, fresh: bool) -> None:
        """A run begins; a fresh one forgets what one before has asked for."""
        self.now = grouping
        if fresh:
            self.next_steps = None

    def begin_pass(self) -> int | None:
        """A pass over the data begins: the accumulation steps that change with it, or None."""
        steps, self.next_steps = self.next_steps, None
        if steps is None or steps == self.now.accumulation_steps:
            return None
        self.now = Grouping(steps)
        return steps

    def state_dict(self) -> dict[str, int | None]:
        return {
            "accumulation_steps": self.now.accumulation_steps,
            "accumulation_built_with": self.built.accumulation_steps,
            "next_accumulation_steps": self.next_steps,
            "global_micro_batches": self.now.global_micro_batches,
        }

    def load_state_dict(self, saved: dict[str, int | None]) -> None:
        built_with = saved["accumulation_built_with"]
        if built_with is not None and built_with == self.built.accumulation_steps:
            # the same program: a change within the run is not undone by a resume
            self.now = Grouping(saved["accumulation_steps"])
            self.next_steps = saved["next_accumulation_steps"]
