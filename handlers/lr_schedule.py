"""The handler that steps a learning-rate schedule: per applied optimizer step, never a skipped one, or per epoch."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers.param_scheduler import LRScheduler as IgniteTorchScheduler
from ignite.handlers.param_scheduler import ParamGroupScheduler, ParamScheduler, ReduceLROnPlateauScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from ignite_engine import Trainer, Updates
from ignite_engine.errors import StateMismatch, leave_out
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.handlers.followed_metric import FollowedMetric
from ignite_engine.loop.position import EpochIs
from ignite_engine.ranks import agreement, mesh
from ignite_engine.schedules import Schedule, set_lr
from ignite_engine.state import Start

logger = logging.getLogger(__name__)

_PARTS = ("optimizer", "step", "state_dict", "load_state_dict")
# the history of a ReduceLROnPlateau; its settings are those given now
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


_OF_GROUPS = ("max_lr", "min_lr")  # where OneCycleLR keeps them
_LITERALS = (bool, int, float, str, type(None))


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
    Where a resume changes the length of the run, a log message tells what becomes of the LR. A scheduler of torch or
    Ignite has the settings that it was saved with; a warning names those that it was now made with otherwise.
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
        self._called = isinstance(scheduler, ParamScheduler | ParamGroupScheduler)
        if not self._called and not all(hasattr(scheduler, method) for method in _PARTS):
            raise TypeError(
                f"scheduler must be a Schedule, a torch or an Ignite scheduler, got {type(scheduler).__name__}; "
                "make one for instance with warmup_cosine(optimizer, warmup=100, total=10_000)."
            )
        step = [] if is_plateau or self._called else [*inspect.signature(scheduler.step).parameters.values()]
        if any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in step):
            raise TypeError(
                f"{type(scheduler).__name__}.step() needs {step[0].name!r}, as torch's schedulers do not: call it in a "
                "handler of your own, and save it by trainer.register(name, scheduler, shared=True)."
            )
        self.scheduler: Any = scheduler
        self.name = name
        self._followed = (
            None if metric is None else FollowedMetric(metric, f"LRSchedule(metric={metric!r})", scheduler.mode)
        )
        self._primed = not self._called
        self._per_update = True
        self._built_lrs = [float(group["lr"]) for group in self._optimizer.param_groups]
        honours = is_plateau or isinstance(scheduler, Schedule)
        self._made_with = {} if honours else _settings(scheduler.state_dict(), self._optimizer)
        """Settings that a resume replaces by those saved."""
        self._used: list[Any] = []
        self._spans: list[Any] | None = None
        """What the length of the run was computed from, where the schedule spans it."""

    def attach(self, engine: Engine, event: Any = TrainingEvents.OPTIMIZER_STEP_COMPLETED) -> None:
        """Step at ``event``; register the state under :attr:`name`, and set the LR of the first update."""
        trainer = Trainer.of(engine)
        self._per_update = event is TrainingEvents.OPTIMIZER_STEP_COMPLETED
        if self._followed is not None and not self._per_update:
            raise ValueError("ReduceLROnPlateau steps at each new value of its metric: attach it without an event.")
        update = getattr(trainer, "update", None)
        stepped: Any = TrainingEvents.OPTIMIZER_STEP_COMPLETED
        if isinstance(update, Updates):
            stepped = update.stepped(self._optimizer)
        known = getattr(update, "optimizers", {})  # an engine of Ignite's own has no update
        if known and not any(self._optimizer is optimizer for optimizer in known.values()):
            raise ValueError(
                f"The optimizer of LRSchedule {self.name!r} is not one of the trainer's ({', '.join(known)}): "
                "make the scheduler from the optimizer that was given to Update."
            )
        self._prepare(trainer)
        if hasattr(trainer, "register"):
            # before subscribing, which would register it as unshared
            trainer.register(self.name, self, shared=True, kind="schedule")
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(stepped, self._note_used)
        trainer.add_event_handler(stepped if self._per_update else event, self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._publish)
        if self._followed is not None:
            trainer.add_event_handler(TrainingEvents.METRICS_READY, self._follow)
            trainer.add_event_handler(Events.COMPLETED, self._followed.warn_if_never_written)
        trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), self._warn_if_unmoved)
        trainer.add_event_handler(Events.COMPLETED, self._warn_if_unmoved)

    def __call__(self, trainer: Engine) -> None:
        if self._called:
            self.scheduler(trainer)
        elif self._followed is None:
            self.scheduler.step()

    def _note_used(self, trainer: Engine) -> None:
        """The LRs of the update just made; clones of tensors, not floats: no host sync per step."""
        lrs = [group["lr"] for group in self._optimizer.param_groups]
        self._used = [lr.clone() if isinstance(lr, torch.Tensor) else lr for lr in lrs]

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state; the LRs set now and the LRs of the last update, per group, as floats."""
        state: dict[str, Any] = {
            "scheduler": self.scheduler.state_dict(),
            "lrs": [float(group["lr"]) for group in self._optimizer.param_groups],
            "used": [float(lr) for lr in self._used],
            "kind": self._kind,
            "made_with": self._made_with,
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
        groups = self._optimizer.param_groups
        if len(state["lrs"]) != len(groups):
            raise StateMismatch(
                f"The saved state of LRSchedule {self.name!r} has {len(state['lrs'])} parameter groups and "
                f"the optimizer has {len(groups)}: build the same groups, or leave it out with {leave_out(self.name)}."
            )
        if state["kind"] != self._kind:
            raise StateMismatch(
                f"The saved state of LRSchedule {self.name!r} is that of {state['kind']}, and this is {self._kind}: "
                f"build the same kind, or leave it out with {leave_out(self.name)}."
            )
        self._warn_of_settings(state["made_with"])
        self.scheduler.load_state_dict(state["scheduler"])
        for group, lr in zip(groups, state["lrs"]):
            set_lr(group, lr)
        if self._followed is not None:
            self._followed.seen_at = state["seen_at"]
        self._primed, self._used, self._spans = True, list(state["used"]), state["spans"]

    def _warn_of_settings(self, saved: dict[str, str]) -> None:
        changed = [
            f"{name} {saved.get(name)} to {self._made_with.get(name)}"
            for name in dict.fromkeys([*saved, *self._made_with])
            if saved.get(name) != self._made_with.get(name)
        ]
        if changed and agreement.rank() == 0:
            logger.warning(
                "The %s of %s was changed (%s): no effect on a resumed run, which restores the saved settings; to "
                "begin anew with those given, leave it out with %s.",
                *(type(self.scheduler).__name__, self.name, ", ".join(changed), leave_out(self.name)),
            )
        self._made_with = saved  # which are in force from here on

    @property
    def _kind(self) -> str:
        if self._followed is not None:
            return f"a plateau schedule of the {self.scheduler.mode} of {self._followed.key}"
        of = "" if getattr(self.scheduler, "param_name", "lr") == "lr" else f" of {self.scheduler.param_name}"
        return f"{type(self.scheduler).__name__}{of} per {'update' if self._per_update else 'epoch'}"

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self.scheduler.optimizer  # a ParamGroupScheduler has a list, one for each of its schedulers
        return optimizer[0] if isinstance(optimizer, list) else optimizer  # type: ignore[no-any-return]  # theirs is untyped

    def _start(self, trainer: Engine) -> None:
        if isinstance(self.scheduler, Schedule) and self.scheduler.spans_run:
            self._span_the_run(trainer, self.scheduler)
        if isinstance(self.scheduler, OneCycleLR) and self._per_update and isinstance(trainer, Trainer):
            total, end = self.scheduler.total_steps, trainer.last_iteration
            if end is not None and end > total:
                raise ValueError(
                    f"OneCycleLR(total_steps={total}) raises after {total} updates, and the run makes {end}: give it "
                    f"total_steps={end}, or run() max_iters={total}."
                )
        self._prepare(trainer)
        is_resumed = isinstance(trainer, Trainer) and trainer.state.start is Start.RESUMED
        if is_resumed and self.name not in trainer.resume_state.loaded:  # type: ignore[attr-defined]  # a Trainer's
            self._begin_again()

    def _begin_again(self) -> None:
        """The run was resumed without this schedule."""
        if not isinstance(self.scheduler, Schedule) and not self._called:
            # torch's have set the first rate when they were made
            for group, lr in zip(self._optimizer.param_groups, self._built_lrs):
                set_lr(group, lr)
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
        spanned, self._spans = self._spans, _length_follows_from(trainer)
        if before is not None and (before == end or spanned == self._spans):
            return
        was = [] if before is None else schedule.get_last_lr()
        schedule.set_total(end)
        now = schedule.get_last_lr()
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
            if self.scheduler.total is not None:
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
        lrs = [float(lr) for lr in self._used or [group["lr"] for group in groups]]
        key = "lr" if self.name == "lr_schedule" else f"lr/{self.name.removeprefix('lr_schedule/')}"
        trainer.state.metrics[key] = lrs[0]
        if len(lrs) > 1:
            for index, (group, lr) in enumerate(zip(groups, lrs)):
                trainer.state.metrics[f"{key}/{group.get('name', index)}"] = lr

    def _warn_if_unmoved(self, trainer: Engine) -> None:
        state = trainer.state
        updates = [self._used, getattr(state, "optimizer_steps", 0), getattr(state, "skipped_steps", 0)]
        if state.iteration and not any(updates):
            warnings.warn(
                f"LRSchedule {self.name!r} did not step in {state.iteration} iterations: the update fired no "
                "OPTIMIZER_STEP_COMPLETED; fire it after optimizer.step(), as Update does.",
                stacklevel=2,
            )

    _publish.phase = Phase.MEASURE  # type: ignore[attr-defined]  # read by the Trainer


def _settings(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, str]:
    """The values of a scheduler that has just been made, as text, by the names of its arguments where it has those."""
    groups = optimizer.param_groups
    of_groups = {name: [group[name] for group in groups] for name in _OF_GROUPS if name in groups[0]}
    return dict(_plain({**state, **of_groups}, ""))


def _plain(value: Any, name: str) -> Iterable[tuple[str, str]]:
    if isinstance(value, Counter):  # MultiStepLR's milestones
        value = sorted(value.elements())
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key != "_last_lr":
                yield from _plain(inner, f"{name}.{key}".strip("._"))
    elif isinstance(value, list | tuple) and not all(isinstance(each, _LITERALS) for each in value):
        for index, inner in enumerate(value):
            yield from _plain(inner, f"{name}[{index}]")
    elif isinstance(value, (*_LITERALS, list, tuple)):
        yield name, repr(value)


def _length_follows_from(trainer: Engine) -> list[Any]:
    """Where this is the same, so is the length of the run: data may say another wrong ``len()`` in each epoch."""
    state = trainer.state
    if isinstance(trainer, Trainer) and trainer.progress.epoch_is is EpochIs.MEASURED:
        return [state.max_epochs, state.max_iters, str(trainer.progress.grouping), mesh.data_size()]
    return [state.max_epochs, state.max_iters, state.epoch_length]


def _rates(lrs: list[float]) -> str:
    return ", ".join(f"{lr:g}" for lr in dict.fromkeys(lrs))
