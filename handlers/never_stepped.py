"""What follows optimizer steps says so where there are none."""

from __future__ import annotations

import warnings

from ignite.engine import Events

from ignite_engine import Trainer


def warn_where_never_stepped(trainer: Trainer, follower: str) -> None:
    """Warn at the end of a run whose update has fired no event of an optimizer step, which ``follower`` waits for."""

    def warn() -> None:
        state = trainer.state
        if state.iteration and not state.optimizer_steps and not state.skipped_steps:
            warnings.warn(
                f"{follower} has done nothing in {state.iteration} iterations: the update fired no "
                "OPTIMIZER_STEP_COMPLETED; fire it after optimizer.step(), as Update does.",
                stacklevel=2,
            )

    trainer.add_event_handler(Events.COMPLETED, warn)
