"""An optimizer that steps once per group of micro-batches, for hand-written loops that call it at each of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine.accumulation.reduction import Reduction
from ignite_engine.accumulation.wrapped import WrappedOptimizer
from ignite_engine.step import precision as precisions
from ignite_engine.step.device import device_of
from ignite_engine.step.gradients import clip_gradients
from ignite_engine.step.micro_batches import check_steps

_OURS = ("accumulation", "scaler")  # what state_dict has beside the wrapped optimizer's


class GradientAccumulationOptimizer(WrappedOptimizer):
    """``optimizer``, gated: call it at every micro-batch, it steps once per group of ``accumulation_steps``.

    Works in any loop that calls, for each micro-batch and in this order, :meth:`backward` (once per loss) and
    :meth:`step`, with :meth:`zero_grad` before the first or after the last of them. Whatever else is asked of it
    (``param_groups``, ``state``, ``add_param_group``, hooks) is the wrapped optimizer's, which stands in
    ``.optimizer``. With ``accumulation_steps=1`` it does what that one does.

    From here on the model's gradients are reduced over ranks in the last micro-batch of a group only; this holds for
    the next forward, so one model has one of these at a time. :meth:`release` gives the model back.

    Args:
        optimizer: over parameters of ``model``.
        model: plain, DDP or FSDP2, wrapped already; a plain model that contains such ones too.
        accumulation_steps: micro-batches per update, at least 1.
        precision: ``fp32``, ``bf16`` or ``fp16``: what :meth:`autocast` is, and whether losses are scaled.
        grad_scaler: torch's GradScaler arguments, for fp16 only.

    Attributes:
        micro_batches: stepped so far in the group that is open, 0 at its edge.
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
        _check(optimizer, model, accumulation_steps)
        super().__init__(optimizer)
        self.model, self.accumulation_steps = model, accumulation_steps
        self.precision, self.device = precisions.check_precision(precision), device_of(model)
        self.scaler = precisions.loss_scaler(precision, self.device.type, grad_scaler)
        self.micro_batches = self.optimizer_steps = self.skipped_steps = 0
        self._has_backward = self._is_reduced = False
        self._reduction = Reduction(model)
        if accumulation_steps > 1:
            self._reduction.check_accumulates()
        self._scheduler: Any = None  # moves with the updates made here; set by initialize()
        self._await_micro_batch()

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward and loss in the precision that was asked for."""
        return precisions.autocast(self.precision, self.device.type)

    def accumulation_boundary(self) -> bool:
        """Whether the micro-batch computed last completes its group; true too before any was.

        After :meth:`backward`: whether :meth:`step` will update. After :meth:`step`: whether it did, or skipped an
        overflow; the group's edge, where to log and to save.
        """
        return self.micro_batches + self._has_backward in (0, self.accumulation_steps)

    def backward(self, loss: Tensor, *, retain_graph: bool | None = None) -> None:
        """Back-propagate ``loss``, the mean over the micro-batch, divided by ``accumulation_steps``.

        Several losses in one micro-batch are one call each, before :meth:`step`. Under DDP each further one at the
        boundary reduces once more; ``backward(first + second)`` does not.
        """
        if self.accumulation_steps > 1:
            loss = loss / self.accumulation_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self._is_reduced:
            self._reduction.backward_again(loss, self.parameters(), retain_graph)
        elif hasattr(self.optimizer, "backward"):  # a wrapper that has its own way to do it
            self.optimizer.backward(loss)
        else:
            loss.backward(retain_graph=retain_graph)
        if not self._is_reduced and self.micro_batches + 1 == self.accumulation_steps:
            self._is_reduced = self._reduction.is_done()
        self._has_backward = True

    def clip_gradients(self, max_norm: float) -> Tensor | None:
        """At the boundary, between :meth:`backward` and :meth:`step`: clip the joint norm; elsewhere do nothing.

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
        """Clear the gradients, but not those of a group that is open."""
        if self.accumulation_steps == 1:
            self._await_micro_batch()
        elif self.micro_batches or self._has_backward:
            return
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def flush(self, max_norm: float | None = None) -> bool:
        """Update with a group that the end of the data cut short; nothing where none is open. A collective.

        The gradients become the plain mean over the micro-batches there are, on all ranks. Under DDP ranks may have
        different numbers of them: each micro-batch weighs the same. (One that has none while others have some works
        but where DDP itself meets them in forward: in the second group, and in every group if it has buffers.)
        Then come clipping to ``max_norm`` if it is given, the step (skipped on an overflow) and the scheduler's; the
        gradients are cleared.

        Returns:
            Whether the weights were updated.
        """
        before = self.optimizer_steps
        if self._has_backward:
            self.step()
        parameters = self.parameters()
        if self.accumulation_steps > 1 and self._reduction.finish_group(
            parameters, self.micro_batches, self.accumulation_steps
        ):
            if max_norm is not None:
                self._clip(max_norm)
            self._update()
            self.optimizer.zero_grad()
        if self._scheduler is not None and self._scheduler.is_due:
            self._scheduler.step()
        return self.optimizer_steps > before

    def release(self) -> None:
        """Let the model reduce at each backward again, for what comes after this optimizer."""
        self._reduction.set_sync(True)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, the counters and the scaler; within a group its gradients too.

        It loads with ``weights_only=True``, and into the bare optimizer.

        Raises:
            RuntimeError: within a group of a DDP or FSDP2 model, whose ranks hold each their own gradients; or between
                :meth:`backward` and :meth:`step`.
        """
        names = ("accumulation_steps", "precision", "micro_batches", "optimizer_steps", "skipped_steps")
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self._has_backward or (self.micro_batches and self._reduction):
            raise RuntimeError(
                f"state_dict() was called within a group ({self.micro_batches + self._has_backward} of "
                f"{self.accumulation_steps} micro-batches), whose gradients it would not hold: call it where "
                "accumulation_boundary() is true after step(), or after flush()."
            )
        if self.micro_batches:
            own["gradients"] = [None if p.grad is None else p.grad.clone() for p in self.parameters()]
        state = {**self.optimizer.state_dict(), "accumulation": own}
        return state if self.scaler is None else {**state, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or a bare optimizer's state; a group that is open here is dropped.

        ``accumulation_steps`` may be another one at the edge of a group. A scaler's state has no use but in fp16.

        Raises:
            ValueError: saved within a group of another length or precision.
        """
        own = {"micro_batches": 0, "optimizer_steps": 0, "skipped_steps": 0, **state_dict.get("accumulation", {})}
        saved = (own.get("accumulation_steps"), own.get("precision"))
        if own["micro_batches"] and saved != (self.accumulation_steps, self.precision):
            raise ValueError(
                f"The state was saved within a group of {saved[0]} micro-batches in {saved[1]}, and this optimizer has "
                f"accumulation_steps={self.accumulation_steps} in {self.precision}: load it with the saved ones."
            )
        if self.micro_batches or self._has_backward:
            self._reduction.reduce_fsdp()
            self.optimizer.zero_grad()
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name not in _OURS})
        if self.scaler is not None and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
        for parameter, gradient in zip(self.parameters(), own.get("gradients", ())):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        self.micro_batches = own["micro_batches"]
        self.optimizer_steps, self.skipped_steps = own["optimizer_steps"], own["skipped_steps"]
        self._await_micro_batch()

    def _await_micro_batch(self) -> None:
        """Set what the next forward needs to know."""
        self._has_backward = self._is_reduced = False
        self._is_finite: bool | None = None
        self._reduction.set_sync(self.micro_batches + 1 == self.accumulation_steps)

    def _expect_backward(self, name: str) -> None:
        if not self._has_backward and (self.accumulation_steps > 1 or self.scaler is not None):
            raise RuntimeError(
                f"{name} came without a backward of this optimizer in this micro-batch: call optimizer.backward(loss), "
                "which divides and scales the loss, in the place of loss.backward()."
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


def _check(optimizer: Any, model: Any, accumulation_steps: Any) -> None:
    if isinstance(optimizer, GradientAccumulationOptimizer):
        raise TypeError("optimizer accumulates gradients already: give the one that stands in its .optimizer.")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    check_steps(accumulation_steps)
    known = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "optimizer holds no parameter of model: make it from model.parameters(), after fully_shard if you shard."
        )
