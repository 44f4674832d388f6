"""The handler that steps a learning-rate schedule: per applied optimizer step, never a skipped one, or per epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers.param_scheduler import LRScheduler as IgniteTorchScheduler
from ignite.handlers.param_scheduler import ParamGroupScheduler, ParamScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ignite_engine import Trainer, Updates
from ignite_engine.errors import StateMismatch, leave_out
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.handlers.followed_metric import FollowedMetric
from ignite_engine.handlers.never_stepped import warn_where_never_stepped
from ignite_engine.loop.position import EpochIs
from ignite_engine.ranks import agreement, mesh
from ignite_engine.schedules import Schedule, set_lr
from ignite_engine.state import Start

logger = logging.getLogger(__name__)

# the history of a ReduceLROnPlateau; its settings are those given now
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class LRSchedule:
    """Steps a schedule once after each applied optimizer step, never after a skipped one, and publishes the LRs.

    ``attach(trainer, Events.EPOCH_COMPLETED)`` steps it once per epoch. torch's ReduceLROnPlateau steps at the boundary
    of each step that has a new value of ``metric`` instead.

    Args:
        scheduler: a :class:`Schedule`, any scheduler of ``torch.optim.lr_scheduler``, or a native one of Ignite (they
            are called once for the first update, then once per applied step). Of Ignite's ``LRScheduler`` the torch
            scheduler inside is stepped. Any other object with ``optimizer``, ``step()``, ``state_dict`` and
            ``load_state_dict`` is stepped as torch's.
        metric: for ReduceLROnPlateau, a key of ``state.metrics`` that is written on every rank; its mean over the ranks
            is used, so that the LR is the same on all of them. One value is one epoch in torch's terms.
        name: of its state in checkpoints; a second schedule of the same trainer needs its own.

    Writes on METRICS_READY, so only where something else is logged: ``lr``, the LR of the first parameter group in the
    last applied update (before the first update: the one that it will use); with several groups also
    ``lr/<group["name"]>``, or the group's index without a name. With a ``name`` of your own ``lr`` is ``lr/<name>``,
    without the ``lr_schedule/`` that it may begin with.

    Raises:
        ValueError: the scheduler needs a metric, or takes none, or (in ``attach``) its optimizer is not one of the
            trainer's, or it is attached to an event that it cannot use; (in a run) its length is not known.
        TypeError: not a scheduler.

    A :class:`Schedule` without a ``total`` is one over the run: over its updates, or, attached per epoch, its epochs.
    Where a resume changes the length of the run, a log message tells what becomes of the LR. A resumed scheduler of
    torch or Ignite has the settings that it was saved with, as with their own ``load_state_dict``.
    """

    def __init__(self, scheduler: Any, *, metric: str | None = None, name: str = "lr_schedule") -> None:
        is_plateau = isinstance(scheduler, ReduceLROnPlateau)
        if is_plateau is (metric is None):
            raise ValueError(
                f"LRSchedule got metric={metric!r} and a {type(scheduler).__name__}: a ReduceLROnPlateau needs "
                "the name of the metric that it follows, such as metric='val/loss', and any other scheduler takes none."
            )
        if isinstance(scheduler, IgniteTorchScheduler):
            # Ignite reads the next LR of a torch scheduler without setting the previous one: many return wrong ones
            inner = scheduler.lr_scheduler
            scheduler = getattr(inner, "_lr_scheduler", inner)
        if not hasattr(scheduler, "optimizer") or not hasattr(scheduler, "state_dict"):
            raise TypeError(
                f"scheduler must be a Schedule, a torch or an Ignite scheduler, got {type(scheduler).__name__}; "
                "make one for instance with warmup_cosine(optimizer, warmup=100, total=10_000)."
            )
        self.scheduler: Any = scheduler
        self.name = name
        self._followed = (
            None if metric is None else FollowedMetric(metric, f"LRSchedule(metric={metric!r})", scheduler.mode)
        )
        self._is_called = isinstance(scheduler, ParamScheduler | ParamGroupScheduler)
        self._is_primed = not self._is_called
        self._per_update = True
        optimizer = scheduler.optimizer  # a ParamGroupScheduler has a list, one for each of its schedulers
        self._optimizer: Optimizer = optimizer[0] if isinstance(optimizer, list) else optimizer
        self._built_lrs = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._used: list[Any] = []
        self._spans: list[Any] | None = None
        """What the length of the run was computed from, where the schedule spans it."""

    def attach(self, engine: Engine, event: Any = TrainingEvents.OPTIMIZER_STEP_COMPLETED) -> None:
        """Step at ``event``; register the state under :attr:`name`, and set the LR of the first update."""
        trainer = Trainer.of(engine)
        self._per_update = event is TrainingEvents.OPTIMIZER_STEP_COMPLETED
        if self._followed is not None and not self._per_update:
            raise ValueError("ReduceLROnPlateau steps at each new value of its metric: attach it without an event.")
        known = trainer.update.optimizers
        if known and not any(self._optimizer is optimizer for optimizer in known.values()):
            raise ValueError(
                f"The optimizer of LRSchedule {self.name!r} is not one of the trainer's ({', '.join(known)}): "
                "make the scheduler from the optimizer that was given to Update."
            )
        update, stepped = trainer.update, TrainingEvents.OPTIMIZER_STEP_COMPLETED
        stepped = update.stepped(self._optimizer) if isinstance(update, Updates) else stepped
        self._prepare(trainer)
        # before subscribing, which would register it as unshared
        trainer.register(self.name, self, shared=True, kind="schedule")
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(stepped, self._note_used)
        trainer.add_event_handler(stepped if self._per_update else event, self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._publish)
        if self._followed is not None:
            trainer.add_event_handler(TrainingEvents.METRICS_READY, self._follow)
            trainer.add_event_handler(Events.COMPLETED, self._followed.warn_if_never_written)
        warn_where_never_stepped(trainer, f"LRSchedule {self.name!r}")

    def __call__(self, trainer: Engine) -> None:
        if self._is_called:
            self.scheduler(trainer)
        elif self._followed is None:
            self.scheduler.step()

    def _note_used(self, trainer: Engine) -> None:
        """The LRs of the update just made; clones of tensors, not floats: no host sync per step."""
        groups = self._optimizer.param_groups
        self._used = [group["lr"].clone() if torch.is_tensor(group["lr"]) else group["lr"] for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state; the LRs of the last update, per group, as floats."""
        state: dict[str, Any] = {
            "scheduler": self.scheduler.state_dict(),
            "used": [float(lr) for lr in self._used],
            "kind": self._kind,
            "spans": self._spans,
        }
        if self._followed is not None:
            state["scheduler"] = {key: state["scheduler"][key] for key in _PLATEAU_STATE}
            state["seen_at"] = self._followed.seen_at
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load it.

        Raises:
            StateMismatch: it is that of another kind of scheduler, or of other parameter groups.
        """
        if state["kind"] != self._kind:
            raise StateMismatch(
                f"The saved state of LRSchedule {self.name!r} is that of {state['kind']}, and this is {self._kind}: "
                f"build the same kind and groups, or leave it out with {leave_out(self.name)}."
            )
        self.scheduler.load_state_dict(state["scheduler"])
        if self._followed is not None:
            self._followed.seen_at = state["seen_at"]
        self._is_primed, self._used, self._spans = True, list(state["used"]), state["spans"]

    @property
    def _kind(self) -> str:
        what = getattr(self.scheduler, "param_name", "lr")
        when, groups = "update" if self._per_update else "epoch", len(self._optimizer.param_groups)
        return f"{type(self.scheduler).__name__} of {what} per {when} for {groups} parameter groups"

    def _start(self, trainer: Trainer) -> None:
        if isinstance(self.scheduler, Schedule) and self.scheduler.spans_run:
            self._span_the_run(trainer, self.scheduler)
        self._prepare(trainer)
        is_resumed = trainer.state.start is Start.RESUMED
        if is_resumed and self.name not in trainer.resume_state.loaded and isinstance(self.scheduler, LRScheduler):
            # it begins again, and torch's have set the first rate when they were made
            for group, lr in zip(self._optimizer.param_groups, self._built_lrs):
                set_lr(group, lr)

    def _span_the_run(self, trainer: Trainer, schedule: Schedule) -> None:
        """Give a schedule without a length that of the run that starts."""
        state, end = trainer.state, trainer.last_iteration
        if not self._per_update:
            by_updates = None
            if end is not None and state.max_iters is not None:
                by_updates = -(-state.max_iters // (state.epoch_length or 1))
            end = min((limit for limit in (state.max_epochs, by_updates) if limit is not None), default=None)
        if end is None:
            raise ValueError(
                f"{schedule} has the length of its run, and this one does not say its own: give it total, or run() "
                "max_iters."
            )
        before, spanned, self._spans = schedule.total, self._spans, _length_follows_from(trainer)
        if before == end or (before is not None and spanned == self._spans):
            return
        schedule.set_total(end)
        if before is not None and schedule.steps and agreement.rank() == 0:
            logger.warning(
                "The run now ends after %s %d, not %d, and its schedule with it: from here on the LR follows the new "
                "curve. A total given to the schedule keeps the old one.",
                *("update" if self._per_update else "epoch", end, before),
            )

    def _prepare(self, trainer: Engine) -> None:
        if self._followed is not None:
            self._followed.begin(trainer)
        # on STARTED too: the loaded state of an optimizer holds an LR, also if this schedule's state was left out
        if isinstance(self.scheduler, Schedule):
            if self.scheduler.total is not None:
                self.scheduler.apply()
        elif not self._is_primed:
            self.scheduler(trainer)
            self._is_primed = True

    def _follow(self, trainer: Engine) -> None:
        """Step with a new value, after the handlers that measure and log at this event."""
        assert self._followed is not None
        value = self._followed.new_value(trainer)
        if value is not None:
            self.scheduler.step(value)

    def _publish(self, trainer: Engine) -> None:
        groups = self._optimizer.param_groups
        lrs = [float(lr) for lr in self._used or [group["lr"] for group in groups]]
        key = "lr" if self.name == "lr_schedule" else f"lr/{self.name.removeprefix('lr_schedule/')}"
        trainer.state.metrics[key] = lrs[0]
        if len(lrs) > 1:
            for index, (group, lr) in enumerate(zip(groups, lrs)):
                trainer.state.metrics[f"{key}/{group.get('name', index)}"] = lr

    _publish.phase = Phase.MEASURE  # type: ignore[attr-defined]  # read by the Trainer


def _length_follows_from(trainer: Trainer) -> list[Any]:
    """Where this is the same, so is the length of the run: data may say another wrong ``len()`` in each epoch."""
    state = trainer.state
    if trainer.progress.epoch_is is EpochIs.MEASURED:
        return [state.max_epochs, state.max_iters, str(trainer.progress.grouping), mesh.data_size()]
    return [state.max_epochs, state.max_iters, state.epoch_length]
