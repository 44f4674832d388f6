"""Gradient accumulation for hand-written loops, and Ignite engines with one iteration for each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ignite_engine.schedules import Schedule
from ignite_engine.step import precision as precisions
from ignite_engine.step.device import device_of
from ignite_engine.step.gradients import clip_gradients
from ignite_engine.step.micro_batches import accumulation_steps_for, check_accumulates, check_steps

__all__ = [
    "GradientAccumulationLRScheduler",
    "GradientAccumulationOptimizer",
    "accumulation_steps_for",
    "initialize",
]


class GradientAccumulationOptimizer(Optimizer):
    """``optimizer``, gated: call it at every micro-batch, it steps once per group of ``accumulation_steps``.

    For any loop that calls, for each micro-batch and in this order, :meth:`backward` and :meth:`step`, with
    :meth:`zero_grad` before the first or after the last of them. Everything else (``param_groups``, ``state``, hooks)
    is the wrapped optimizer's, ``.optimizer``. With ``accumulation_steps=1`` it behaves as that one.

    From construction on the model's gradients are reduced over ranks in the last micro-batch of a group only. This is
    set on the model before each forward, so a model has one of these at a time; :meth:`release` restores the model.

    Args:
        optimizer: over parameters of ``model``.
        model: plain, DDP or FSDP2, already wrapped, or a plain model that contains such modules.
        accumulation_steps: micro-batches per update, at least 1.
        precision: ``fp32``, ``bf16`` or ``fp16``: of :meth:`autocast`; fp16 scales the loss.
        grad_scaler: torch's GradScaler arguments, for fp16 only.

    Attributes:
        micro_batches: stepped so far in the open group, 0 between groups.
        optimizer_steps: updates made.
        skipped_steps: groups whose gradients overflowed (fp16).

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        accumulation_steps: int,
        *,
        precision: str = "fp32",
        grad_scaler: Mapping[str, Any] | None = None,
    ) -> None:
        # torch's own initializer is left out: it would make groups and hooks of its own
        _check(optimizer, model, accumulation_steps)
        self.optimizer, self.model, self.accumulation_steps = optimizer, model, accumulation_steps
        self.precision, self.device = precisions.check_precision(precision), device_of(model)
        self.scaler = precisions.loss_scaler(precision, self.device.type, grad_scaler)
        self.micro_batches = self.optimizer_steps = self.skipped_steps = 0
        self._has_backward = False
        self._scheduler: GradientAccumulationLRScheduler | None = None  # set by initialize()
        self._ddp: list[Any] = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._fsdp: list[Any] = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]
        self._await_micro_batch()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # the wrapped optimizer's
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in vars(self):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward and loss in ``precision``."""
        return precisions.autocast(self.precision, self.device.type)

    def accumulation_boundary(self) -> bool:
        """Whether the last micro-batch completes its group; True before the first one.

        After :meth:`backward`: whether :meth:`step` will update. After :meth:`step`: whether it did, or skipped an
        overflow; the place to log and to save.
        """
        return self.micro_batches + self._has_backward in (0, self.accumulation_steps)

    def backward(self, loss: Tensor, *, retain_graph: bool | None = None) -> None:
        """Back-propagate ``loss``, the mean over the micro-batch, divided by ``accumulation_steps``.

        Several losses in one micro-batch are one call each, before :meth:`step`; under DDP their sum is one call.

        Raises:
            RuntimeError: a second call in a micro-batch of a DDP model, whose gradients would stay on their ranks.
        """
        if self._has_backward and self._ddp:
            raise RuntimeError(
                "backward() was called twice in a micro-batch of a DDP model, which reduces once per forward: call "
                "backward(first + second)."
            )
        loss = loss / self.accumulation_steps
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(retain_graph=retain_graph)
        self._has_backward = True

    def clip_gradients(self, max_norm: float) -> Tensor | None:
        """Clip the joint norm at the boundary, between :meth:`backward` and :meth:`step`; elsewhere do nothing.

        Returns:
            The norm before clipping, in the units of the loss, shape ``()`` on the device; None elsewhere.
        """
        self._expect_backward("clip_gradients()")
        return self._clip(max_norm) if self.accumulation_boundary() else None

    def step(self, closure: Any = None) -> Any:
        """Count a micro-batch, and update if it completes its group.

        With fp16 an overflow skips the update; ``skipped_steps`` and the scheduler know.

        Returns:
            What the wrapped optimizer's step returns; None where there was none.

        Raises:
            RuntimeError: :meth:`backward` was not called (a bare ``loss.backward()`` is neither divided nor scaled).
        """
        if self.accumulation_steps > 1 or self.scaler is not None:
            if closure is not None:
                raise ValueError("step() takes no closure with accumulation_steps > 1 or fp16: call backward() before.")
            self._expect_backward("step()")
        self.micro_batches += 1
        if self.micro_batches == self.accumulation_steps:
            return self._update(closure)
        self._await_micro_batch()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, but not those of an open group."""
        if self.accumulation_steps == 1 or not (self.micro_batches or self._has_backward):
            self._has_backward = False
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def flush(self, max_norm: float | None = None) -> bool:
        """Update with the incomplete last group; does nothing without an open group. A collective under DDP.

        The gradients become the plain mean over the group's micro-batches on all ranks, which may have different
        numbers of them. Then follow clipping to ``max_norm`` if given, the step (skipped on an overflow) and the
        scheduler's step; the gradients are cleared.

        Returns:
            Whether the weights were updated.

        Raises:
            RuntimeError: a group of an FSDP2 model is open, whose gradients cannot be reduced without a backward.
        """
        before = self.optimizer_steps
        if self._has_backward:
            self.step()
        if self._mean_of_the_tail():
            if max_norm is not None:
                self._clip(max_norm)
            self._update()
            self.optimizer.zero_grad()
        if self._scheduler is not None and self._scheduler.is_due:
            self._scheduler.step()
        return self.optimizer_steps > before

    def release(self) -> None:
        """Let the model reduce at each backward again, for use without this optimizer."""
        self._set_sync(True)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, the counters and the scaler; within a group its gradients too.

        It loads with ``weights_only=True``, and into the bare optimizer.

        Raises:
            RuntimeError: within a group of a DDP or FSDP2 model, where each rank has gradients of its own; or between
                :meth:`backward` and :meth:`step`.
        """
        names = ("accumulation_steps", "precision", "micro_batches", "optimizer_steps", "skipped_steps")
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self._has_backward or (self.micro_batches and (self._ddp or self._fsdp)):
            raise RuntimeError(self._within_a_group("saved"))
        if self.micro_batches:
            own["gradients"] = [None if p.grad is None else p.grad.clone() for p in self.parameters()]
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {**self.optimizer.state_dict(), "accumulation": own, **scaler}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or a bare optimizer's state; an open group here is discarded.

        ``accumulation_steps`` may differ if it was saved between groups. A scaler's state is used in fp16 only.

        Raises:
            ValueError: saved within a group of another length or precision.
        """
        state = dict(state_dict)
        own = {"micro_batches": 0, "optimizer_steps": 0, "skipped_steps": 0, **state.pop("accumulation", {})}
        scaler = state.pop("scaler", None)
        saved = (own.get("accumulation_steps"), own.get("precision"))
        if own["micro_batches"] and saved != (self.accumulation_steps, self.precision):
            raise ValueError(
                f"The state was saved within a group of {saved[0]} micro-batches in {saved[1]}, and this optimizer has "
                f"accumulation_steps={self.accumulation_steps} in {self.precision}: load it with the saved ones."
            )
        self.optimizer.load_state_dict(state)
        if self.scaler is not None and scaler is not None:
            self.scaler.load_state_dict(scaler)
        self.optimizer.zero_grad()
        for parameter, gradient in zip(self.parameters(), own.get("gradients", ())):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        self.micro_batches = own["micro_batches"]
        self.optimizer_steps, self.skipped_steps = own["optimizer_steps"], own["skipped_steps"]
        self._await_micro_batch()

    def __getstate__(self) -> dict[str, Any]:
        """Everything, the model included: to be copied or pickled together with it, between groups."""
        if self.micro_batches or self._has_backward:
            raise RuntimeError(self._within_a_group("copied"))
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def _within_a_group(self, what: str) -> str:
        return (
            f"The optimizer was {what} within a group ({self.micro_batches + self._has_backward} of "
            f"{self.accumulation_steps} micro-batches), whose gradients would be lost: do it where "
            "accumulation_boundary() is true after step(), or after flush()."
        )

    def _set_sync(self, reduces: bool) -> None:
        for module in self._ddp:
            module.require_backward_grad_sync = reduces  # as its no_sync() does; read in forward
        for module in self._fsdp:
            module.set_requires_gradient_sync(reduces)

    def _await_micro_batch(self) -> None:
        """Set the model up for the next forward."""
        self._has_backward = False
        self._is_finite: bool | None = None
        self._set_sync(self.micro_batches + 1 == self.accumulation_steps)

    def _expect_backward(self, name: str) -> None:
        if not self._has_backward and (self.accumulation_steps > 1 or self.scaler is not None):
            raise RuntimeError(
                f"{name} was called without optimizer.backward(loss) in this micro-batch: call it instead of "
                "loss.backward(), as it divides and scales the loss."
            )

    def _unscale(self) -> bool:
        """Whether all gradients are finite; unscales them once per update."""
        if self._is_finite is None:
            self._is_finite = self.scaler is None or self.scaler.unscale_all([self.optimizer])
        return self._is_finite

    def _clip(self, max_norm: float) -> Tensor:
        self._unscale()
        return clip_gradients(self.parameters(), max_norm)

    def _update(self, closure: Any = None) -> Any:
        try:
            if not self._unscale():
                self.skipped_steps += 1
                return None
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            self.optimizer_steps += 1
            if self._scheduler is not None:
                self._scheduler.is_due = True
            return result
        finally:
            if self.scaler is not None:
                self.scaler.adjust()
            self.micro_batches = 0
            self._await_micro_batch()

    def _mean_of_the_tail(self) -> bool:
        """Make the gradients of an incomplete group the mean over all its micro-batches; False if there is none."""
        if self._fsdp and self.micro_batches:
            raise RuntimeError(
                f"flush() cannot reduce the {self.micro_batches} micro-batches of an open group of an FSDP2 model: end "
                "the data with a whole group."
            )
        count, parameters = self.micro_batches, self.parameters()
        for module in self._ddp:
            reduced = {id(parameter) for parameter in module.parameters()}
            count = _sum_over_ranks(module, [p for p in parameters if id(p) in reduced], self.micro_batches)
        if count:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.mul_(self.accumulation_steps / count)
        return count > 0


class GradientAccumulationLRScheduler(LRScheduler):
    """``scheduler``, gated: call :meth:`step` at every micro-batch, it steps once per update.

    From :func:`initialize` it follows the optimizer, and never steps for a skipped update. Made alone it counts its own
    calls and steps at every ``accumulation_steps``-th. Everything else is the wrapped scheduler's, ``.scheduler``.

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
        state = dict(state_dict)
        own = {"is_due": False, "calls": 0, **state.pop("accumulation", {})}
        self.scheduler.load_state_dict(state)
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
    over = getattr(scheduler, "optimizer", None)
    if over is not None and getattr(over, "param_groups", None) is not optimizer.param_groups:
        raise ValueError("scheduler is over another optimizer: make it from the optimizer that is given beside it.")
    following = GradientAccumulationLRScheduler(scheduler, accumulation_steps)
    gated._scheduler, following._follows = following, True
    return gated, following


def _check(optimizer: Any, model: Any, accumulation_steps: Any) -> None:
    if isinstance(optimizer, GradientAccumulationOptimizer):
        raise TypeError("optimizer accumulates gradients already: give its .optimizer.")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    check_steps(accumulation_steps)
    if accumulation_steps > 1:
        for module in model.modules():
            check_accumulates(module)
            if hasattr(module, "no_sync") and not isinstance(module, DistributedDataParallel):
                raise ValueError(
                    f"{type(module).__name__} holds back its reduction in a context only: use gradient_sync(model, "
                    "last=...) around each forward and backward, or DDP or FSDP2."
                )
    known = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "optimizer holds no parameter of model: make it from model.parameters(), after fully_shard if you shard."
        )


def _sum_over_ranks(ddp: Any, parameters: Sequence[Tensor], count: int) -> int:
    """Sum the gradients of ``parameters`` and ``count`` over the ranks of ``ddp``; nothing where all counts are zero.

    A parameter without a gradient on any rank stays without; on a rank without a micro-batch ``grad`` is that of the
    last update, and counts as none.
    """
    kinds = [0 if not count or p.grad is None else len(parameters) + 1 if p.grad.is_sparse else 1 for p in parameters]
    known = torch.tensor([count, *kinds], dtype=torch.int64, device=ddp.device)
    dist.all_reduce(known, group=ddp.process_group)
    total, *found = known.tolist()
    if total:
        for parameter, kind, own in zip(parameters, found, kinds, strict=True):
            if kind and not own:
                parameter.grad = _no_rows(parameter) if kind > len(parameters) else torch.zeros_like(parameter)
            if kind and parameter.grad is not None:
                parameter.grad = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad.contiguous()
                dist.all_reduce(parameter.grad, group=ddp.process_group)
    return int(total)


def _no_rows(parameter: Tensor) -> Tensor:
    """A sparse gradient of nothing, as an embedding makes them."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
