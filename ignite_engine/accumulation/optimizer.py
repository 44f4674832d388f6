"""An optimizer that steps once per group of micro-batches, for hand-written loops that call it at each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    For any loop that calls, for each micro-batch and in this order, :meth:`backward` (once per loss) and
    :meth:`step`, with :meth:`zero_grad` before the first or after the last of them. Everything else
    (``param_groups``, ``state``, ``add_param_group``, hooks) is delegated to the wrapped optimizer, ``.optimizer``.
    With ``accumulation_steps=1`` it behaves as that one.

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
        self._scheduler: Any = None  # follows the updates made here; set by initialize()
        self._await_micro_batch()

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

        Several losses in one micro-batch are one call each, before :meth:`step`. Under DDP each further one at the
        boundary reduces once more; ``backward(first + second)`` does not.
        """
        if self.accumulation_steps > 1:
            loss = loss / self.accumulation_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self._is_reduced:
            self._reduction.backward_again(loss, self.parameters(), retain_graph)
        elif hasattr(self.optimizer, "backward"):  # a wrapper with a backward of its own
            self.optimizer.backward(loss)
        else:
            loss.backward(retain_graph=retain_graph)
        if not self._is_reduced and self.micro_batches + 1 == self.accumulation_steps:
            self._is_reduced = self._reduction.is_done()
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
        if self.accumulation_steps == 1:
            self._await_micro_batch()
        elif self.micro_batches or self._has_backward:
            return
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def flush(self, max_norm: float | None = None) -> bool:
        """Update with the incomplete last group; does nothing without an open group. A collective.

        The gradients become the plain mean over the group's micro-batches, on all ranks. Under DDP ranks may have
        different numbers of them: each micro-batch weighs the same. (A rank without any, while others have some, fails
        where DDP synchronizes in forward: in the second group, and in every group if the model has buffers.)
        Then follow clipping to ``max_norm`` if given, the step (skipped on an overflow) and the scheduler's step; the
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
        """Let the model reduce at each backward again, for use without this optimizer."""
        self._reduction.set_sync(True)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, the counters and the scaler; within a group its gradients too.

        It loads with ``weights_only=True``, and into the bare optimizer.

        Raises:
            RuntimeError: within a group of a DDP or FSDP2 model, where each rank has gradients of its own; or between
                :meth:`backward` and :meth:`step`.
        """
        gradients = self._open_gradients()
        names = ("accumulation_steps", "precision", "micro_batches", "optimizer_steps", "skipped_steps")
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        if gradients is not None:
            own["gradients"] = gradients
        state = {**self.optimizer.state_dict(), "accumulation": own}
        return state if self.scaler is None else {**state, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or a bare optimizer's state; an open group here is discarded.

        ``accumulation_steps`` may differ if it was saved between groups. A scaler's state is used in fp16 only.

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
        self._set_gradients(own.get("gradients", ()))
        self.micro_batches = own["micro_batches"]
        self.optimizer_steps, self.skipped_steps = own["optimizer_steps"], own["skipped_steps"]
        self._await_micro_batch()

    def __getstate__(self) -> dict[str, Any]:
        """Everything, the model included; within a group its gradients too, as in :meth:`state_dict`."""
        return {**super().__getstate__(), "gradients": self._open_gradients()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        gradients = state["gradients"]
        super().__setstate__({name: value for name, value in state.items() if name != "gradients"})
        self._set_gradients(gradients or ())

    def _open_gradients(self) -> list[Tensor | None] | None:
        if self._has_backward or (self.micro_batches and self._reduction):
            raise RuntimeError(
                f"The optimizer was saved within a group ({self.micro_batches + self._has_backward} of "
                f"{self.accumulation_steps} micro-batches), whose gradients would be lost: save it where "
                "accumulation_boundary() is true after step(), or after flush()."
            )
        if not self.micro_batches:
            return None
        return [None if p.grad is None else p.grad.clone() for p in self.parameters()]

    def _set_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters(), gradients):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _await_micro_batch(self) -> None:
        """Set the model up for the next forward."""
        self._has_backward = self._is_reduced = False
        self._is_finite: bool | None = None
        self._reduction.set_sync(self.micro_batches + 1 == self.accumulation_steps)

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


def _check(optimizer: Any, model: Any, accumulation_steps: Any) -> None:
    if isinstance(optimizer, GradientAccumulationOptimizer):
        raise TypeError("optimizer accumulates gradients already: give its .optimizer.")
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
