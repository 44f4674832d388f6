"""The handler that steps a learning-rate schedule: per applied optimizer step, never a skipped one, or per epoch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers.param_scheduler import LRScheduler as IgniteTorchScheduler
from ignite.handlers.param_scheduler import ParamGroupScheduler, ParamScheduler, ReduceLROnPlateauScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ignite_engine import Trainer, Updates
from ignite_engine.errors import StateMismatch, change_on_resume, leave_out
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.handlers.built_schedule import Settings, highest_rate, kind_of, owners
from ignite_engine.handlers.followed_metric import FollowedMetric
from ignite_engine.ranks import agreement
from ignite_engine.schedules import Schedule, set_lr
from ignite_engine.state import Start

logger = logging.getLogger(__name__)

_PARTS = ("optimizer", "step", "state_dict", "load_state_dict")
# the history of a ReduceLROnPlateau; its settings are those given now
_OF_VALUES = ("best", "num_bad_epochs", "cooldown_counter")
_PLATEAU_STATE = (*_OF_VALUES, "last_epoch")


class LRSchedule:
    """Steps a schedule once after each applied optimizer step, never after a skipped one, and publishes the LRs.

    ``attach(trainer, Events.EPOCH_COMPLETED)`` steps it once per epoch. torch's ReduceLROnPlateau steps at the boundary
    of each step that has a new value of ``metric`` instead.

    Args:
        scheduler: a :class:`Schedule`, any scheduler of ``torch.optim.lr_scheduler``, or a native one of Ignite (they
            are called once for the first update, then once per applied step). Of Ignite's ``LRScheduler`` the torch
            scheduler inside is stepped. One with ``step_update``, as timm's, gets both calls of its own loop:
            ``step_update(updates)`` after each applied step and ``step(epochs)`` after each epoch. Any other object
            with ``optimizer``, ``step()``, ``state_dict`` and ``load_state_dict`` is stepped as torch's.
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
    Where a resume changes the length of the run, one line says what becomes of the LR. One of torch's that is built
    with other settings on a resume goes on as if it had been built so from the start, and one line says so; where its
    LR is then not known, the state is refused.
    """

    replayed = True

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
        known = isinstance(scheduler, (Schedule, LRScheduler, ParamScheduler, ParamGroupScheduler))
        if not known and not all(hasattr(scheduler, method) for method in _PARTS):
            raise TypeError(
                f"scheduler must be a Schedule, a torch or an Ignite scheduler, got {type(scheduler).__name__}; "
                "make one for instance with warmup_cosine(optimizer, warmup=100, total=10_000)."
            )
        self.scheduler: Any = scheduler
        self.name = name
        self._part = "optimizer"
        self._registered: Mapping[str, Any] = {}
        self._followed = None if metric is None else FollowedMetric(metric, f"LRSchedule(metric={metric!r})")
        self._called = isinstance(scheduler, (ParamScheduler, ParamGroupScheduler))
        self._primed = not self._called
        self._counts_both = hasattr(scheduler, "step_update")
        self._per_update = True
        self._settings = None if is_plateau else Settings(scheduler, name)
        self._built_lrs = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._used: list[Any] = []  # not for a Schedule that steps with the optimizer, which can be asked

    def attach(self, trainer: Engine, event: Any = TrainingEvents.OPTIMIZER_STEP_COMPLETED) -> None:
        """Step at ``event``; register the state under :attr:`name`, and set the LR of the first update."""
        self._per_update = event is TrainingEvents.OPTIMIZER_STEP_COMPLETED
        self._check_event(event)
        update = getattr(trainer, "update", None)
        stepped: Any = TrainingEvents.OPTIMIZER_STEP_COMPLETED
        if isinstance(update, Updates):
            stepped = update.stepped(self._optimizer)
        known = getattr(getattr(trainer, "update", None), "optimizers", None)
        if isinstance(known, Mapping) and not any(self._optimizer is optimizer for optimizer in known.values()):
            raise ValueError(
                f"The optimizer of LRSchedule {self.name!r} is not one of the trainer's ({', '.join(known)}): "
                "make the scheduler from the optimizer that was given to Update."
            )
        self._prepare(trainer)
        if isinstance(trainer, Trainer):
            self._registered = trainer.registry.objects
            of_mine = (
                part for part, obj in self._registered.items() if getattr(obj, "optimizer", obj) is self._optimizer
            )
            self._part = next(of_mine, self._part)
        if hasattr(trainer, "register"):
            # before subscribing, which would register it as unshared
            trainer.register(self.name, self, shared=True, kind="schedule")
        trainer.add_event_handler(Events.STARTED, self._start)
        if self._counts_both:
            trainer.add_event_handler(stepped, self._count_update)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, self._count_epoch)
        else:
            if not self._per_update:
                trainer.add_event_handler(stepped, self._note_used)
            trainer.add_event_handler(stepped if self._per_update else event, self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._publish)
        if self._followed is not None:
            trainer.add_event_handler(TrainingEvents.METRICS_READY, self._follow)
            trainer.add_event_handler(Events.COMPLETED, self._followed.warn_if_never_written)
        trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), self._warn_if_unmoved)
        trainer.add_event_handler(Events.COMPLETED, self._warn_if_unmoved)

    def _check_event(self, event: Any) -> None:
        if self._per_update or (self._counts_both and event is Events.EPOCH_COMPLETED):
            return
        if self._followed is not None:
            raise ValueError("ReduceLROnPlateau steps at each new value of its metric: attach it without an event.")
        if self._counts_both:
            kind = type(self.scheduler).__name__
            raise ValueError(f"{kind} is told of each update and each epoch: attach it without an event.")

    def __call__(self, trainer: Engine) -> None:
        if self._per_update and not isinstance(self.scheduler, Schedule):
            self._note_used(trainer)
        if self._called:
            self.scheduler(trainer)
        elif self._followed is None:
            self.scheduler.step()

    def _note_used(self, trainer: Engine) -> None:
        """The LRs of the update just made; clones of tensors, not floats: no host sync per step."""
        lrs = [group["lr"] for group in self._optimizer.param_groups]
        self._used = [lr.clone() if isinstance(lr, torch.Tensor) else lr for lr in lrs]

    def _count_update(self, trainer: Engine) -> None:
        self._note_used(trainer)
        state: Any = trainer.state
        self.scheduler.step_update(state.optimizer_steps)

    def _count_epoch(self, trainer: Engine) -> None:
        self.scheduler.step(trainer.state.epoch)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state; the LRs set now and the LRs of the last update, per group, as floats."""
        lrs = [float(group["lr"]) for group in self._optimizer.param_groups]
        used = [float(lr) for lr in self._used]
        state = {"scheduler": self.scheduler.state_dict(), "lrs": lrs, "used": used, "kind": kind_of(self.scheduler)}
        state["steps"] = self._unit
        if self._settings is not None:
            state["built"] = self._settings.saved()
        if self._followed is not None:
            state["scheduler"] = {key: state["scheduler"][key] for key in _PLATEAU_STATE}
            state |= {"seen_at": self._followed.seen_at, "follows": self._follows}
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
        kind = kind_of(self.scheduler)
        if (was := state.get("kind", kind)) != kind:
            raise StateMismatch(
                f"The saved state of LRSchedule {self.name!r} is that of {was}, and this is {kind}: "
                f"build the same kind, or leave it out with {leave_out(self.name)}."
            )
        if (unit := state.get("steps", self._unit)) != self._unit:
            raise StateMismatch(
                f"LRSchedule {self.name!r} was saved as one that steps per {unit}, and now it steps per "
                f"{self._unit}: attach it as it was, or begin it again with {leave_out(self.name)}."
            )
        if self._followed is not None:
            self._followed.seen_at = state["seen_at"]
        built = _bases(self.scheduler)
        # the optimizer, which has said it; the rates of Ignite's schedulers are their own
        was_loaded = not self._called and [float(group["lr"]) for group in groups] == state["lrs"]
        self._load_scheduler(state)
        if not was_loaded and built != (bases := _bases(self.scheduler)) and agreement.rank() == 0:
            logger.warning(
                "%s restores the base LR %s and not %s, with which the optimizer was built. To go on from there with "
                "another, give %s.",
                *(self.name, _rates(bases), _rates(built), change_on_resume(self._part, {("", "lr"): built[0]}, 1)),
            )
        self._primed, self._used = True, list(state["used"])

    def _load_scheduler(self, state: Mapping[str, Any]) -> None:
        """Load it and the LRs of the next update, or be the one that is built now with other settings."""
        changes, groups = None, self._optimizer.param_groups
        if self._settings is None:
            self.scheduler.load_state_dict(self._of_plateau(state))
        else:
            others = [obj for obj in self._registered.values() if isinstance(obj, LRSchedule) and obj is not self]
            of_rates = (other for other in others if getattr(other.scheduler, "param_name", "lr") == "lr")
            is_alone = not any(other._optimizer is self._optimizer for other in of_rates)
            changes = self._settings.load(state["scheduler"], state.get("built", {}), state["lrs"], is_alone=is_alone)
        if changes is None:
            for group, lr in zip(groups, state["lrs"]):
                set_lr(group, lr)
        elif agreement.rank() == 0:
            now, was = (_rates(lrs) for lrs in ([float(group["lr"]) for group in groups], state["lrs"]))
            follows = "" if now == was else f"; its LR is {now} in place of {was}"
            logger.warning(
                "%s goes on as it is built now, not as it was saved: %s%s.", self.name, ", ".join(changes), follows
            )

    def _of_plateau(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The saved history, without that of the values of another metric or mode."""
        history = dict(state["scheduler"])
        if (was := state.get("follows", self._follows)) != self._follows:
            history = {key: value for key, value in history.items() if key not in _OF_VALUES}
            if agreement.rank() == 0:
                logger.warning(
                    "%s follows the %s now, and followed the %s when it was saved: its best value and its patience "
                    "begin anew.",
                    *(self.name, self._follows, was),
                )
        return history

    @property
    def _follows(self) -> str:
        return f"{self.scheduler.mode} of {self._followed.key}" if self._followed is not None else ""

    @property
    def _unit(self) -> str:
        return "update" if self._per_update else "epoch"

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self.scheduler.optimizer  # a ParamGroupScheduler has a list, one for each of its schedulers
        return optimizer[0] if isinstance(optimizer, list) else optimizer  # type: ignore[no-any-return]  # theirs is untyped

    def _start(self, trainer: Engine) -> None:
        if isinstance(self.scheduler, Schedule) and self.scheduler.shape is not None:
            self._span_the_run(trainer, self.scheduler)
        self._prepare(trainer)
        is_resumed = isinstance(trainer, Trainer) and trainer.state.start is Start.RESUMED
        if is_resumed and self.name not in trainer.resume_state.loaded:  # type: ignore[attr-defined]  # a Trainer's
            self._begin_again()

    def _begin_again(self) -> None:
        """The run was resumed without this schedule."""
        if (
            not isinstance(self.scheduler, Schedule) and not self._called
        ):  # torch's have set the first rate when they were made
            for group, lr in zip(self._optimizer.param_groups, self._built_lrs):
                set_lr(group, lr)
            if self._settings is not None:
                self._settings.begin_again()
        if agreement.rank() == 0:
            lrs = [float(group["lr"]) for group in self._optimizer.param_groups]
            logger.warning("%s begins at its first step, with the LR %s.", self.name, _rates(lrs))

    def _span_the_run(self, trainer: Engine, schedule: Schedule) -> None:
        """Give a schedule without a length that of the run that starts."""
        state, end = trainer.state, trainer.last_iteration if isinstance(trainer, Trainer) else None
        if not self._per_update:
            by_updates = state.max_iters if end is not None else None
            limits = (state.max_epochs, None if by_updates is None else -(-by_updates // (state.epoch_length or 1)))
            end = min((limit for limit in limits if limit is not None), default=None)
        if end is None:
            raise ValueError(
                f"{schedule} has the length of its run, and this one does not say its own: give it total, or run() "
                "max_iters."
            )
        before, unit = schedule.total, "update" if self._per_update else "epoch"
        # the length with which the run began, where a handler has changed the accumulation since
        as_built = trainer.progress.length_as_built if self._per_update and isinstance(trainer, Trainer) else None
        if before == end or (before is not None and before == as_built):
            return
        was = schedule.lrs_at(schedule.steps) if schedule.is_known else []
        schedule.set_total(end)
        now = schedule.lrs_at(schedule.steps)
        if schedule.steps and was and agreement.rank() == 0:
            logger.warning(
                "The run now ends after %s %d, not %d, and its schedule with it: from here on the LR follows the new "
                "curve, %s in place of %s. A total given to the schedule keeps the old one.",
                *(unit, end, before, _rates(now), _rates(was)),
            )

    def _prepare(self, trainer: Engine) -> None:
        if self._followed is not None:
            self._followed.begin(trainer)
        # on STARTED too: the loaded state of an optimizer holds an LR, also if this schedule's state was left out
        if isinstance(self.scheduler, Schedule):
            if self.scheduler.is_known:
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
        if isinstance(self.scheduler, Schedule) and self._per_update:
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


def _bases(scheduler: Any) -> list[float]:
    """The base LRs of a scheduler that has some; of Ignite's the highest."""
    rates = (highest_rate(part) for _, part in owners(scheduler) if getattr(part, "param_name", "lr") == "lr")
    return [float(base) for base in getattr(scheduler, "base_lrs", ())] or [max(filter(None, rates), default=0.0)]


def _rates(lrs: list[float]) -> str:
    return ", ".join(f"{lr:g}" for lr in dict.fromkeys(lrs))
