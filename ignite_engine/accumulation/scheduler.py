"""A scheduler that steps once per update, for hand-written loops that call it at each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ignite_engine.accumulation.optimizer import GradientAccumulationOptimizer
from ignite_engine.schedules import Schedule
from ignite_engine.step.micro_batches import check_steps


class GradientAccumulationLRScheduler(LRScheduler):
    """``scheduler``, gated: call :meth:`step` at every micro-batch, it steps once per update.

    From :func:`initialize` it follows the optimizer: it steps if there was an update since its last step, never for
    a skipped one. Made alone it counts its own calls and steps at every ``accumulation_steps``-th. Everything else is
    delegated to the wrapped scheduler, ``.scheduler``.

    Args:
        scheduler: one of torch, or of ``ignite_engine.handlers`` (its first LR is set here), over the optimizer.
        accumulation_steps: micro-batches per update, at least 1.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.
    """

    def __init__(self, scheduler: Any, accumulation_steps: int) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau follows a metric: call its own step(metric) after each evaluation.")
        if isinstance(scheduler, GradientAccumulationLRScheduler):
            raise TypeError("scheduler is gated already: give its .scheduler.")
        if not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
            raise TypeError(
                f"scheduler must have step, state_dict and load_state_dict, as those of torch.optim.lr_scheduler do, "
                f"got {type(scheduler).__name__}."
            )
        check_steps(accumulation_steps)
        # torch's own initializer is not called: it would step the wrapped one
        self.scheduler, self.accumulation_steps = scheduler, accumulation_steps
        self.is_due, self._calls, self._follows = False, 0, False
        if isinstance(scheduler, Schedule):
            scheduler.apply()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if there was an update; the arguments are passed to the wrapped scheduler."""
        if not self._follows:
            self._calls += 1
            self.is_due = self._calls == self.accumulation_steps
        if self.is_due:
            self.is_due, self._calls = False, 0
            self.scheduler.step(*args, **kwargs)

    def flush(self) -> None:
        """Step for an incomplete last group; only for one made alone, ``optimizer.flush()`` does it otherwise."""
        if self.is_due or self._calls:
            self.is_due, self._calls = False, 0
            self.scheduler.step()

    def get_last_lr(self) -> list[Any]:
        """The LR of each parameter group, that of the next update."""
        if hasattr(self.scheduler, "get_last_lr"):
            return list(self.scheduler.get_last_lr())
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]

    def get_lr(self) -> list[Any]:
        return list(self.scheduler.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state and the position in the group; it loads into the bare scheduler too."""
        return {**self.scheduler.state_dict(), "accumulation": {"is_due": self.is_due, "calls": self._calls}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or a bare scheduler's state."""
        own = {"is_due": False, "calls": 0, **state_dict.get("accumulation", {})}
        self.scheduler.load_state_dict({name: value for name, value in state_dict.items() if name != "accumulation"})
        self.is_due, self._calls = own["is_due"], own["calls"]

    def __getattr__(self, name: str) -> Any:
        if "scheduler" not in vars(self):
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def initialize(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any,
    accumulation_steps: int = 1,
    *,
    precision: str = "fp32",
    grad_scaler: Mapping[str, Any] | None = None,
) -> tuple[GradientAccumulationOptimizer, GradientAccumulationLRScheduler]:
    """Gate ``optimizer`` and ``scheduler`` for a loop that calls them at every micro-batch.

    Args:
        model: plain, DDP or FSDP2, already wrapped.
        optimizer: over parameters of ``model``.
        scheduler: over ``optimizer``.
        accumulation_steps: micro-batches per update.
        precision: see :class:`GradientAccumulationOptimizer`, also for ``grad_scaler``.

    Returns:
        The optimizer, and a scheduler that follows its updates.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.
    """
    if scheduler is None:
        raise TypeError("initialize() needs a scheduler: without one make GradientAccumulationOptimizer alone.")
    gated = GradientAccumulationOptimizer(
        optimizer, model, accumulation_steps, precision=precision, grad_scaler=grad_scaler
    )
    following = GradientAccumulationLRScheduler(scheduler, accumulation_steps)
    over = getattr(scheduler, "optimizer", None)
    if over is not None and getattr(over, "param_groups", None) is not optimizer.param_groups:
        raise ValueError("scheduler is over another optimizer: make it from the optimizer that is given beside it.")
    gated._scheduler, following._follows = following, True
    return gated, following
