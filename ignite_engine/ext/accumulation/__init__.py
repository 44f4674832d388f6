"""Gradient accumulation for hand-written loops, and Ignite engines with one iteration for each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_engine.errors import check_type
from ignite_engine.schedules import Schedule
from ignite_engine.update import precision as precisions
from ignite_engine.update.device import device_of
from ignite_engine.update.micro_batches import accumulation_steps_for, check_accumulates, check_steps, reducing_modules
from ignite_engine.update.parameters import clip_gradients

__all__ = ["GradientAccumulationLRScheduler", "GradientAccumulationOptimizer", "accumulation_steps_for", "initialize"]


class GradientAccumulationOptimizer(Optimizer):
    """``optimizer``, gated: call it at every micro-batch, it steps once per group of ``accumulation_steps``.

    For any loop that calls, for each micro-batch and in this order, :meth:`backward` and :meth:`step`, with
    :meth:`zero_grad` before the first or after the last of them. Everything else (``param_groups``, ``state``, hooks)
    is the wrapped optimizer's, ``.optimizer``. From construction on the model's gradients are reduced over ranks in the
    last micro-batch of a group only.

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
        precision: str = "fp32",
        grad_scaler: Mapping[str, Any] | None = None,
    ) -> None:
        # torch's own initializer is left out: it would make groups and hooks of its own
        check_type("optimizer", optimizer, isinstance(optimizer, Optimizer), "an optimizer of torch")
        check_steps(accumulation_steps)
        self.optimizer, self.model, self.accumulation_steps = optimizer, model, accumulation_steps
        self.precision, self.device = precisions.check_precision(precision), device_of(model)
        scaler = precisions.loss_scaler(precision, self.device.type, grad_scaler)
        self.scaler = scaler or precisions.LossScaler(self.device.type, enabled=False)
        self.micro_batches = self.optimizer_steps = self.skipped_steps = 0
        self._reducing: list[Any] = reducing_modules(model)
        self._has_backward = False
        for module in self._reducing if accumulation_steps > 1 else ():
            check_accumulates(module)
        self._await_micro_batch()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

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
        if self._has_backward and any(isinstance(module, DistributedDataParallel) for module in self._reducing):
            raise RuntimeError("backward() was called twice in a micro-batch of DDP: call backward(first + second).")
        self.scaler.scale(loss / self.accumulation_steps).backward(retain_graph=retain_graph)
        self._has_backward = True

    def clip_gradients(self, max_norm: float) -> Tensor | None:
        """Clip the joint norm at the boundary, between :meth:`backward` and :meth:`step`; elsewhere do nothing.

        Returns:
            The norm before clipping, in the units of the loss, shape ``()`` on the device; None elsewhere.
        """
        if not self.accumulation_boundary():
            return None
        self._unscale()
        return clip_gradients(self.parameters(), max_norm)

    def step(self) -> None:  # type: ignore[override]  # a closure would not accumulate
        """Count a micro-batch, and update if it completes its group.

        With fp16 an overflow skips the update; ``skipped_steps`` and the scheduler know.

        Raises:
            RuntimeError: :meth:`backward` was not called (a bare ``loss.backward()`` is neither divided nor scaled).
        """
        if not self._has_backward:
            raise RuntimeError("step() was called without optimizer.backward(loss), which divides and scales it.")
        self.micro_batches = (self.micro_batches + 1) % self.accumulation_steps
        if not self.micro_batches:
            if self._unscale():
                self.optimizer.step()
                self.optimizer_steps += 1
            else:
                self.skipped_steps += 1
            self.scaler.adjust()
        self._await_micro_batch()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, but not those of an open group."""
        if not self.micro_batches and not self._has_backward:
            self.optimizer.zero_grad(set_to_none)

    def flush(self, max_norm: float | None = None) -> bool:
        """Update with the incomplete last group; does nothing without an open group. A collective under DDP.

        The gradients become the plain mean over the group's micro-batches on all ranks, which may have different
        numbers of them. Then follow clipping to ``max_norm`` if given, and the step (skipped on an overflow); the
        gradients are cleared. The loop's call of the scheduler comes after it, as after :meth:`step`.

        Returns:
            Whether the weights were updated.

        Raises:
            RuntimeError: a group of an FSDP2 model is open, or a DDP model has sparse gradients.
        """
        before = self.optimizer_steps
        if self._has_backward:
            self.step()
        count = self.micro_batches
        for module in self._reducing:
            if isinstance(module, DistributedDataParallel):
                count = _sum_over_ranks(module, self.micro_batches)
            elif count:
                raise RuntimeError("flush() cannot reduce an open group of FSDP2: end the data with a whole group.")
        if count:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.accumulation_steps / count)
            # from here on it is a whole group after its last backward
            self.micro_batches, self._has_backward = self.accumulation_steps - 1, True
            if max_norm is not None:
                self.clip_gradients(max_norm)
            self.step()
            self.zero_grad()
        return self.optimizer_steps > before

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, the counters and the scaler; it loads into the bare optimizer too.

        Raises:
            RuntimeError: within a group, whose gradients would be lost.
        """
        if self.micro_batches or self._has_backward:
            raise RuntimeError(
                "The optimizer was saved within a group: save it after flush(), or at accumulation_boundary()."
            )
        counters = {"optimizer_steps": self.optimizer_steps, "skipped_steps": self.skipped_steps}
        return {**self.optimizer.state_dict(), "accumulation": counters, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or a bare optimizer's state; an open group here is discarded.

        ``accumulation_steps`` and ``precision`` may differ. A scaler's state is used in fp16 only.
        """
        state = dict(state_dict)
        vars(self).update(state.pop("accumulation", {"optimizer_steps": 0, "skipped_steps": 0}), micro_batches=0)
        scaler = state.pop("scaler", None)
        if scaler and self.scaler.is_enabled():
            self.scaler.load_state_dict(scaler)
        self.optimizer.load_state_dict(state)
        self.optimizer.zero_grad()
        self._await_micro_batch()

    def _await_micro_batch(self) -> None:
        """Set the model up for the next forward, in which DDP decides whether it reduces."""
        self._has_backward = False
        self._is_finite: bool | None = None
        is_last = self.micro_batches + 1 == self.accumulation_steps
        for module in self._reducing:
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = is_last
            else:
                module.set_requires_gradient_sync(is_last)

    def _unscale(self) -> bool:
        """Whether all gradients are finite; unscales them once per update."""
        if self._is_finite is None:
            self._is_finite = self.scaler.unscale_all([self.optimizer])
        return self._is_finite


class GradientAccumulationLRScheduler(LRScheduler):
    """``scheduler``, gated: call :meth:`step` at every micro-batch, it steps once per update.

    From :func:`initialize` it follows the optimizer, and never steps for a skipped update. Made alone it counts its own
    calls and steps at every ``accumulation_steps``-th. Everything else is the wrapped scheduler's, ``.scheduler``.

    Args:
        scheduler: one of torch, or of ``ignite_engine.handlers`` (its first LR is set here), over the optimizer.
        accumulation_steps: micro-batches per update, at least 1.
        optimizer: whose updates it follows; None: it counts its own calls.
    """

    def __init__(
        self, scheduler: Any, accumulation_steps: int, optimizer: GradientAccumulationOptimizer | None = None
    ) -> None:
        # torch's own initializer is not called: it would step the wrapped one
        check_steps(accumulation_steps)
        self.scheduler, self.accumulation_steps, self.gated = scheduler, accumulation_steps, optimizer
        self.calls = self.seen = 0
        if isinstance(scheduler, Schedule):
            scheduler.apply()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any) -> None:
        """Step if there was an update; the arguments are passed to the wrapped scheduler."""
        self.calls += 1
        updates = self.calls // self.accumulation_steps if self.gated is None else self.gated.optimizer_steps
        if updates != self.seen:
            self.seen = updates
            self.scheduler.step(*args)

    def get_last_lr(self) -> list[Any]:
        """The LR of each parameter group, that of the next update."""
        return list(self.scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state and the position in the group; it loads into the bare scheduler too."""
        return {**self.scheduler.state_dict(), "accumulation": {"calls": self.calls, "seen": self.seen}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or a bare scheduler's state."""
        state = dict(state_dict)
        seen = 0 if self.gated is None else self.gated.optimizer_steps
        vars(self).update(state.pop("accumulation", {"calls": 0, "seen": seen}))
        self.scheduler.load_state_dict(state)


def initialize(
    model: nn.Module, optimizer: Optimizer, scheduler: Any, accumulation_steps: int = 1, **options: Any
) -> tuple[GradientAccumulationOptimizer, GradientAccumulationLRScheduler]:
    """Gate ``optimizer`` and ``scheduler`` for a loop that calls them at every micro-batch.

    Args:
        model: plain, DDP or FSDP2, already wrapped.
        optimizer: over parameters of ``model``.
        scheduler: over ``optimizer``.
        accumulation_steps: micro-batches per update.
        options: ``precision`` and ``grad_scaler``, see :class:`GradientAccumulationOptimizer`.

    Returns:
        The optimizer, and a scheduler that follows its updates.
    """
    gated = GradientAccumulationOptimizer(optimizer, model, accumulation_steps, **options)
    return gated, GradientAccumulationLRScheduler(scheduler, accumulation_steps, gated)


def _sum_over_ranks(ddp: Any, micro_batches: int) -> int:
    """Sum the gradients of this rank's ``micro_batches`` over the ranks of ``ddp``; the micro-batches of all."""
    if any(getattr(module, "sparse", False) for module in ddp.modules()):
        raise RuntimeError("flush() cannot reduce sparse gradients: end the data with a whole group.")
    total = torch.tensor(micro_batches, device=next(ddp.parameters()).device)
    dist.all_reduce(total, group=ddp.process_group)
    for parameter in ddp.parameters() if total else ():
        if parameter.requires_grad:
            if not micro_batches or parameter.grad is None:  # it may be that of the last update
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous()
            dist.all_reduce(parameter.grad, group=ddp.process_group)
    return int(total)
