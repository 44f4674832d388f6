"""Autocast and loss scaling: what a precision's name means on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ignite_engine import devices
from ignite_engine.errors import check_type, leave_out

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Precision = str | Callable[[], AbstractContextManager[Any]]
"""``fp32``, ``bf16``, ``fp16``, or what makes the context of one forward pass."""


def check_precision(precision: str) -> str:
    """Return ``precision`` if it is known.

    Raises:
        ValueError: it is not one of ``fp32``, ``bf16``, ``fp16``.
    """
    if precision not in DTYPES:
        raise ValueError(f"precision must be one of {', '.join(DTYPES)}, got {precision!r}.")
    return precision


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[Any]:
    """The context of forward passes in ``precision`` on ``device_type`` (``cpu``, say), one after the other.

    Raises:
        ValueError: it is a name that is not known.
        TypeError: (when it is entered) what ``precision`` returns is no context manager.
    """
    if callable(precision):
        return _MadeAnew(precision)
    dtype = DTYPES[check_precision(precision)]
    context = None if dtype is None else devices.autocast(device_type, dtype)
    return nullcontext() if context is None else context


class _MadeAnew(AbstractContextManager[Any]):
    """A context that is made each time it is entered, as those of ``contextlib`` can be entered once only."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._entered = make, list[AbstractContextManager[Any]]()

    def __enter__(self) -> Any:
        context = self._make()
        if not hasattr(context, "__enter__"):
            raise TypeError(
                f"precision must be a function that returns a context manager, got one that returned {context!r}."
            )
        entered = context.__enter__()
        self._entered.append(context)
        return entered

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class LossScaler(GradScaler):
    """torch's GradScaler with one verdict over several optimizers: all step, or none does.

    torch decides for each optimizer separately, so that an overflow in the sparse one would leave the dense one
    stepping, and the weights would belong to no iteration.
    """

    _unscaled = False

    @property
    def growth(self) -> dict[str, float]:
        """The options by which the scale changes."""
        return {
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, the options included; a warning names those that were built otherwise."""
        built = self.growth
        super().load_state_dict(state_dict)
        changed = [f"{name} {now} to {built[name]}" for name, now in self.growth.items() if now != built[name]]
        if changed:
            logger.warning(
                "The loss scaler was changed (%s): no effect on a resumed run, which restores the saved options. To "
                "begin with these and the first scale, leave it out with %s.",
                ", ".join(changed),
                leave_out("scaler"),
            )

    def unscale_all(self, optimizers: Iterable[Optimizer]) -> bool:
        """Unscale the gradients of ``optimizers``; whether all of them are finite (one read of the device).

        Of sharded gradients (DTensor) the verdict is that of their whole device mesh, which is one collective.

        Call once per update, after the last backward and before clipping; True where there is no gradient.
        """
        joint: list[Any] = _joint_optimizers(optimizers)
        for optimizer in joint:
            self.unscale_(optimizer)
        self._unscaled = bool(joint)
        return all([self.step(optimizer) is not None for optimizer in joint])  # a list, as torch expects a step of each

    def adjust(self) -> None:
        """Raise or lower the scale by what :meth:`unscale_all` found; call once, after the step or its skip."""
        if self._unscaled:
            self._unscaled = False
            self.update()

    def discard(self) -> None:
        """Forget what :meth:`unscale_all` found: the step is left out as if it had never been, the scale stays."""
        if self._unscaled:
            self._unscaled = False
            self.update(self.get_scale())


class _JointOptimizer:
    """Several optimizers as the one that torch's scaler asks for; its step is called where all is finite."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.param_groups = [{"params": parameters}]

    def step(self) -> bool:
        return True


def _joint_optimizers(optimizers: Iterable[Optimizer]) -> list[_JointOptimizer]:
    """One for the plain parameters that have a gradient and one for each device mesh, which torch takes apart only."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    unique = {id(parameter): parameter for group in groups for parameter in group["params"]}  # unscaled once
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in unique.values():
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return [_JointOptimizer(parameters) for parameters in by_mesh.values()]


def loss_scaler(precision: Precision, device_type: str, options: Mapping[str, Any] | None) -> LossScaler | None:
    """A scaler for ``fp16``, None for the other precisions.

    Args:
        options: torch's GradScaler arguments (``init_scale``, ``growth_factor``, ``backoff_factor``,
            ``growth_interval``, ``enabled``).

    Raises:
        ValueError: options are given for a precision that does not scale.
    """
    is_mapping = options is None or isinstance(options, Mapping)
    check_type("grad_scaler", options, is_mapping, "a mapping of GradScaler's arguments or None")
    if precision == "fp16":
        return LossScaler(device_type, **(options or {}))
    if options:
        raise ValueError(
            f"grad_scaler options have no effect with precision {precision!r}: leave them out or use fp16."
        )
    return None
