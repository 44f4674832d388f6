"""The state of a run that handlers read: :class:`TrainingState` and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ignite.engine import Engine, State

COUNTERS = ("micro_batches", "optimizer_steps", "skipped_steps", "evaluations", "checkpoints", "windows", "read_errors")
TOTALS = ("samples", "tokens")
"""Counted only where an interval asks for them."""


class Start(Enum):
    """How the current run began; ``run()`` sets it once, before STARTED."""

    FRESH = "fresh"
    """Nothing was trained before: all counters are zero."""
    RESUMED = "resumed"
    """A checkpoint was loaded: counters, data position and random numbers continue where it was saved."""
    CONTINUED = "continued"
    """Iterations are counted on from the run before in this process. Its data continues where it was; after
    ``terminate()``, and where the counters were set by hand, with a new pass."""


class Metrics(dict[str, Any]):
    """``state.metrics``: a dict that remembers which values are new since they were last published.

    Producers assign floats; the Trainer fires ``METRICS_READY`` when :attr:`fresh` is not empty and clears it after.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.fresh: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.fresh[key] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, values: Any) -> Metrics:  # type: ignore[override, misc]  # dict's is generic
        self.update(values)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


@dataclass(frozen=True)
class OngoingEvaluation:
    """The current evaluation, for handlers of ``EVALUATION_STARTED``."""

    name: str
    """The name of the set that is evaluated."""
    undo: ExitStack
    """Takes callbacks; they run when this evaluation is over, however it ends, the last one first."""
    evaluator: Engine
    """Runs it, an iteration for each batch."""


class _MetricsField:
    """``state.metrics``: a plain dict that a user assigns becomes :class:`Metrics`, all of it new.

    Without a ``__get__`` the instance's own value is read, without a call.
    """

    def __set__(self, state: Any, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Metrics):
            given, values = values, Metrics()
            values.update(given)
        state.__dict__["metrics"] = values


class TrainingState(State):
    """Ignite's ``State`` with the counters and the outcome of a training run. Each field has one writer.

    Ignite's own, written by the Trainer: ``iteration`` (updates so far), ``epoch`` (1-based), ``epoch_length``
    (iterations), ``max_epochs``, ``max_iters``, ``batch``, ``output``, ``dataloader``, ``times`` (seconds), ``seed``.
    """

    metrics: Metrics = _MetricsField()  # type: ignore[assignment]  # what it holds
    """Newest value of everything measured, by name. Writers: the producers (Evaluation, MetricLogger, ...)."""
    output: Any
    """What the update of the last completed iteration returned; None before the first. Writer: Trainer."""
    meters: dict[str, Any]
    """Meters of ``ignite_engine.handlers`` by the name under which MetricLogger writes them; the same on every rank.
    Writers: handlers."""
    micro_batches: int
    """Micro-batches begun; in the events of one, its number. Writer: Update."""
    optimizer_steps: int
    """Steps that changed the weights. Writer: Update."""
    skipped_steps: int
    """Iterations without a step: overflow, or nothing with weight in the group. Writer: Update."""
    evaluations: int
    """Evaluations completed. Writer: Evaluation."""
    checkpoints: int
    """Checkpoints committed. Writer: Checkpoint."""
    checkpoint_path: Path | None
    """The directory of the checkpoint committed last, None before the first. Writer: Checkpoint."""
    windows: int
    """Windows begun; in the events of a window, its number. Writer: Trainer."""
    windows_completed: int
    """Windows that were trained on to their end. Writer: Trainer."""
    window: Any
    """What the stream named the window that is trained on now, None between windows and on a rank that has none.
    Writer: Trainer."""
    read_errors: int
    """Batches that could not be read and were left out, over all ranks. Writer: Trainer."""
    samples: int | None
    """Samples trained on in the whole run over all ranks, None: no interval counts them. Writer: Trainer."""
    tokens: int | None
    """Tokens, likewise. Writer: Trainer."""
    group: Any
    """The :class:`~ignite_engine.update.micro_batches.Group` of this iteration's micro-batches, grouped or not, None
    without data: how many it has over all ranks, and how many repeat one with weight zero. Writer: Trainer."""
    status: str
    """``created``, ``running``, ``completed``, ``interrupted`` or ``failed``. Writer: Trainer."""
    start: Start
    """How the run began. Writer: Trainer."""
    reason: str | None
    """Why the run ended as it did: ``max_epochs``, ``SIGINT``, ``ValueError: ...``. Writer: Trainer."""
    last: bool
    """This step boundary is the run's last. Writer of this and the next three: Trainer."""
    stopping: bool
    """The run stops at this step boundary, because a rank has asked for it."""
    save_requested: bool
    """A rank has asked for a checkpoint at this step boundary (SIGUSR1)."""
    background_done: bool
    """On some rank background work has ended: all ranks collect theirs at this step boundary."""
    not_finite_at: int | None
    """First iteration reported because its loss or gradients were not finite. Writers: MetricLogger, non-finite policy.
    """
    saved_iteration: int | None
    """Iteration of the checkpoint committed last. Writer: Checkpoint."""
    save_seconds: float
    """What the last save took from its start to its commit, in s. Writer: Checkpoint."""
    evaluating: OngoingEvaluation | None
    """The evaluation that runs now, from EVALUATION_STARTED to EVALUATION_COMPLETED. Writer: Evaluation."""

    def at_boundary(
        self, *, last: bool = False, stopping: bool = False, save_requested: bool = False, background_done: bool = False
    ) -> None:
        """Set what all ranks have agreed on for a step boundary."""
        self.last, self.stopping = last, stopping
        self.save_requested, self.background_done = save_requested, background_done

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in COUNTERS:
            setattr(self, name, 0)
        self.windows_completed = 0
        self.window = None
        self.samples = self.tokens = None
        self.checkpoint_path = None
        self.group = None
        self.status = "created"
        self.start = Start.FRESH
        self.reason = None
        self.at_boundary()
        self.not_finite_at = None
        self.saved_iteration = None
        self.save_seconds = 0.0
        self.meters = {}
        self.evaluating = None
