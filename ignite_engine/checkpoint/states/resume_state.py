"""What a checkpoint brought and the run has not taken yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ignite_engine.checkpoint.states.metrics import MetricState

Adapt = Callable[[str, Any], Any]
"""Makes of the saved state of a part, by the part's name, the state that its registered object loads."""


def unchanged(part: str, state: Any) -> Any:
    """The state as it was saved."""
    return state


class ResumeState:
    """Waits here between ``checkpoint.resume()`` and the first batch. The run takes it in this order:

    1. ``run()``: the counters are there, so the run is *resumed*; :attr:`data` positions the loader.
    2. STARTED: handlers may still register objects, which claim their parts from :attr:`unclaimed`.
    3. After STARTED whatever is unclaimed is an error. Metrics, which reset themselves at STARTED, are loaded again.
    4. Random numbers are restored. EPOCH_STARTED comes for an epoch that has not begun.
    5. Before the first batch all of it is dropped (:meth:`clear`).

    A run that fails before 5, because a part is unclaimed, say, leaves it here: the next ``run()`` resumes.
    """

    def __init__(self) -> None:
        self.source: str | None = None
        """Where the parts are from, for messages."""
        self.unclaimed: dict[str, Any] = {}
        """Parts that no registered object has claimed, by name."""
        self.adapt: Adapt = unchanged
        """Applied to a part when its object claims it."""
        self.saved_grouping: Any = None
        """The ``Grouping`` that an iteration had where the run's counters were saved; None: none were loaded."""
        self.data: dict[str, Any] | None = None
        """The position in the data."""
        self.in_eval_mode: list[str] = []
        """Modules of the model that were in eval mode."""
        self.rng: dict[str, Any] | None = None
        """States of the random number generators."""
        self.metrics: list[tuple[MetricState, Any]] = []
        """Ignite's metrics that are attached to the Trainer, each with its state."""
        self.loaded: set[str] = set()
        """Names of the objects whose state was loaded since the last run."""

    @property
    def is_pending(self) -> bool:
        """The run's counters were loaded, and no run has begun with them yet."""
        return self.saved_grouping is not None

    def restore_metrics(self) -> None:
        """Load the metrics again, after they have reset themselves because a run starts."""
        for metric, state in self.metrics:
            metric.load_state_dict(state)

    def clear(self) -> None:
        """The first batch is about to be fetched: nothing waits any more."""
        self.saved_grouping, self.data, self.rng, self.metrics, self.in_eval_mode = None, None, None, [], []
        self.loaded.clear()
