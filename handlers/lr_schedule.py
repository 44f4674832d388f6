"""The handler that steps a learning-rate schedule: once per applied optimizer step, never for a skipped one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers.param_scheduler import LRScheduler as IgniteTorchScheduler
from ignite.handlers.param_scheduler import ParamGroupScheduler, ParamScheduler, ReduceLROnPlateauScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ignite_engine.errors import StateMismatch, leave_out
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.handlers.followed_metric import FollowedMetric
from ignite_engine.schedules import Schedule, set_lr

# the history of a ReduceLROnPlateau; its settings are those given now
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class LRSchedule:
    """Steps a schedule once after each applied optimizer step, never after a skipped one, and publishes the LRs.

    torch's ReduceLROnPlateau steps at the boundary of each step that has a new value of ``metric`` instead.

    Args:
        scheduler: a :class:`Schedule`, any scheduler of ``torch.optim.lr_scheduler``, or a native one of Ignite (they
            are called once for the first update, then once per applied step). Of Ignite's ``LRScheduler`` the torch
            scheduler inside is stepped.
        metric: for ReduceLROnPlateau, a key of ``state.metrics`` that is written on every rank; its mean over the ranks
            is used, so that the LR is the same on all of them. One value is one epoch in torch's terms.
        name: of its state in checkpoints; a second schedule of the same trainer needs its own.

    Writes on METRICS_READY, so only where something else is logged: ``lr``, the LR of the first parameter group in the
    last applied update (before the first update: the one that it will use); with several groups also
    ``lr/<group["name"]>``, or the group's index without a name. With a ``name`` of your own ``lr`` is ``lr/<name>``,
    without the ``lr_schedule/`` that it may begin with.

    Raises:
        ValueError: the scheduler needs a metric, or takes none, or (in ``attach``) its optimizer is not one of the
            trainer's.
        TypeError: not a scheduler.
    """

    def __init__(self, scheduler: Any, *, metric: str | None = None, name: str = "lr_schedule") -> None:
        if isinstance(scheduler, ReduceLROnPlateauScheduler):
            raise ValueError(
                "ReduceLROnPlateauScheduler reads a metric of the evaluator that it is attached to: "
                "give torch's ReduceLROnPlateau and the name of its metric, for instance metric='val/loss'."
            )
        is_plateau = isinstance(scheduler, ReduceLROnPlateau)
        if is_plateau and metric is None:
            raise ValueError(
                "ReduceLROnPlateau needs the name of the metric that it follows: give for instance metric='val/loss'."
            )
        if metric is not None and not is_plateau:
            raise ValueError(
                f"metric={metric!r} has no effect on a {type(scheduler).__name__}, which steps with the optimizer: "
                "remove it, or give a ReduceLROnPlateau."
            )
        if isinstance(scheduler, IgniteTorchScheduler):
            # Ignite reads the next LR of a torch scheduler without setting the previous one: many return wrong ones
            inner = scheduler.lr_scheduler
            scheduler = getattr(inner, "_lr_scheduler", inner)
        if not isinstance(scheduler, (Schedule, LRScheduler, ParamScheduler, ParamGroupScheduler)):
            raise TypeError(
                f"scheduler must be a Schedule, a torch or an Ignite scheduler, got {type(scheduler).__name__}; "
                "make one for instance with warmup_cosine(optimizer, warmup=100, total=10_000)."
            )
        self.scheduler: Any = scheduler
        self.name = name
        self._followed = None if metric is None else FollowedMetric(metric, f"LRSchedule(metric={metric!r})")
        self._called = isinstance(scheduler, (ParamScheduler, ParamGroupScheduler))
        self._primed = not self._called
        self._used: list[Any] = []  # not for a Schedule, which can be asked

    def attach(self, trainer: Engine) -> None:
        """Subscribe, register the state under :attr:`name`, and set the LR of the first update."""
        known = getattr(getattr(trainer, "update", None), "optimizers", None)
        if isinstance(known, Mapping) and not any(self._optimizer is optimizer for optimizer in known.values()):
            raise ValueError(
                f"The optimizer of LRSchedule {self.name!r} is not one of the trainer's ({', '.join(known)}): "
                "make the scheduler from the optimizer that was given to Update."
            )
        self._prepare(trainer)
        if hasattr(trainer, "register"):
            # before subscribing, which would register it as unshared
            trainer.register(self.name, self, shared=True, kind="schedule")
        trainer.add_event_handler(Events.STARTED, self._prepare)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._publish)
        if self._followed is not None:
            trainer.add_event_handler(TrainingEvents.METRICS_READY, self._follow)
            trainer.add_event_handler(Events.COMPLETED, self._followed.warn_if_never_written)
        trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), self._warn_if_unmoved)
        trainer.add_event_handler(Events.COMPLETED, self._warn_if_unmoved)

    def __call__(self, trainer: Engine) -> None:
        if not isinstance(self.scheduler, Schedule):
            # a clone of a tensor, not a float: no host sync per step
            lrs = [group["lr"] for group in self._optimizer.param_groups]
            self._used = [lr.clone() if isinstance(lr, torch.Tensor) else lr for lr in lrs]
        if self._called:
            self.scheduler(trainer)
        elif self._followed is None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state; the LRs set now and the LRs of the last update, per group, as floats."""
        lrs = [float(group["lr"]) for group in self._optimizer.param_groups]
        used = [float(lr) for lr in self._used]
        state = {"scheduler": self.scheduler.state_dict(), "lrs": lrs, "used": used}
        if self._followed is not None:
            state["scheduler"] = {key: state["scheduler"][key] for key in _PLATEAU_STATE}
            state["seen_at"] = self._followed.seen_at
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        groups = self._optimizer.param_groups
        if len(state["lrs"]) != len(groups):
            raise StateMismatch(
                f"The saved state of LRSchedule {self.name!r} has {len(state['lrs'])} parameter groups and "
                f"the optimizer has {len(groups)}: build the same groups, or leave it out with {leave_out(self.name)}."
            )
        if (self._followed is not None) != ("seen_at" in state):
            kinds = ("a plateau schedule", "a schedule that steps with the optimizer")
            was, now = kinds if "seen_at" in state else reversed(kinds)
            raise StateMismatch(
                f"The saved state of LRSchedule {self.name!r} is that of {was}, and this is {now}: "
                f"build the same kind, or leave it out with {leave_out(self.name)}."
            )
        if self._followed is not None:
            self._followed.seen_at = state["seen_at"]
        self.scheduler.load_state_dict(state["scheduler"])
        self._primed, self._used = True, list(state["used"])
        for group, lr in zip(groups, state["lrs"]):
            set_lr(group, lr)

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self.scheduler.optimizer  # a ParamGroupScheduler has a list, one for each of its schedulers
        return optimizer[0] if isinstance(optimizer, list) else optimizer  # type: ignore[no-any-return]  # theirs is untyped

    def _prepare(self, trainer: Engine) -> None:
        if self._followed is not None:
            self._followed.begin(trainer)
        # on STARTED too: the loaded state of an optimizer holds an LR, also if this schedule's state was left out
        if isinstance(self.scheduler, Schedule):
            self.scheduler.apply()
        elif not self._primed:
            self.scheduler(trainer)
            self._primed = True

    def _follow(self, trainer: Engine) -> None:
        """Step with a new value, after the handlers that measure and log at this event."""
        assert self._followed is not None
        value = self._followed.new_value(trainer)
        if value is not None:
            self.scheduler.step(value)

    def _publish(self, trainer: Engine) -> None:
        groups = self._optimizer.param_groups
        if isinstance(self.scheduler, Schedule):
            lrs = self.scheduler.lrs_at(max(self.scheduler.steps - 1, 0))
        else:
            lrs = [float(lr) for lr in self._used or [group["lr"] for group in groups]]
        key = "lr" if self.name == "lr_schedule" else f"lr/{self.name.removeprefix('lr_schedule/')}"
        trainer.state.metrics[key] = lrs[0]
        if len(lrs) > 1:
            for index, (group, lr) in enumerate(zip(groups, lrs)):
                trainer.state.metrics[f"{key}/{group.get('name', index)}"] = lr

    def _warn_if_unmoved(self, trainer: Engine) -> None:
        state, steps = trainer.state, self.scheduler.steps if isinstance(self.scheduler, Schedule) else len(self._used)
        if state.iteration and not (
            steps or getattr(state, "optimizer_steps", 0) or getattr(state, "skipped_steps", 0)
        ):
            warnings.warn(
                f"LRSchedule {self.name!r} did not step in {state.iteration} iterations: the update fired no "
                "OPTIMIZER_STEP_COMPLETED; fire it after optimizer.step(), as Update does.",
                stacklevel=2,
            )

    _publish.phase = Phase.MEASURE  # type: ignore[attr-defined]  # read by the Trainer
