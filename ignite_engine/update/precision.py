"""Autocast and loss scaling: what a precision's name means on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ignite_engine import devices
from ignite_engine.errors import leave_out

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

    What ``precision`` returns, if it is a function, serves one pass only.

    Raises:
        ValueError: it is a name that is not known.
    """
    if callable(precision):
        return precision()
    dtype = DTYPES[check_precision(precision)]
    return (dtype and devices.autocast(device_type, dtype)) or nullcontext()


class LossScaler(GradScaler):
    """torch's GradScaler with one verdict over several optimizers: all step, or none does.

    torch decides for each optimizer separately, so that an overflow in the sparse one would leave the dense one
    stepping, and the weights would belong to no iteration.
    """

    _unscaled = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, the options included; a warning names those that were built otherwise."""
        built = self.state_dict()
        super().load_state_dict(state_dict)
        growth = ("growth_factor", "backoff_factor", "growth_interval")
        changed = [name for name in growth if built and built[name] != state_dict[name]]
        if changed:
            logger.warning(
                "The loss scaler was changed (%s): no effect on a resumed run, which restores the saved options. To "
                "begin with these and the first scale, leave it out with %s.",
                ", ".join(f"{name} {state_dict[name]} to {built[name]}" for name in changed),
                leave_out("scaler"),
            )

    def unscale_all(self, optimizers: Iterable[Optimizer]) -> bool:
        """Unscale the gradients of ``optimizers``; whether all of them are finite (one read of the device).

        Of sharded gradients (DTensor) the verdict is that of their whole device mesh, which is one collective.

        Call once per update, after the last backward and before clipping; True where there is no gradient.
        """
        by_mesh: dict[Any, dict[int, Tensor]] = {}  # torch takes gradients of several meshes apart only
        for optimizer in optimizers:
            for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                if parameter.grad is not None:
                    mesh = getattr(parameter.grad, "device_mesh", None)
                    by_mesh.setdefault(mesh, {})[id(parameter)] = parameter  # one of two optimizers is unscaled once
        joint: list[Any] = [_JointOptimizer([{"params": list(alike.values())}]) for alike in by_mesh.values()]
        for optimizer in joint:
            self.unscale_(optimizer)
        self._unscaled = bool(joint)
        return all([self.step(optimizer) is not None for optimizer in joint])  # a list, as torch expects a step of each

    def adjust(self, new_scale: float | None = None) -> None:
        """Raise or lower the scale by what :meth:`unscale_all` found; call once, after the step or its skip.

        Args:
            new_scale: given, what was found is forgotten.
        """
        if self._unscaled:
            self._unscaled = False
            self.update(new_scale)


class _JointOptimizer(NamedTuple):
    """Several optimizers as the one that torch's scaler asks for; its step is called where all is finite."""

    param_groups: list[dict[str, list[Tensor]]]

    def step(self) -> bool:
        return True


def loss_scaler(precision: Precision, device_type: str, options: Mapping[str, Any] | None) -> LossScaler | None:
    """A scaler for ``fp16``, None for the other precisions.

    Args:
        options: torch's GradScaler arguments (``init_scale``, ``growth_factor``, ``backoff_factor``,
            ``growth_interval``, ``enabled``).

    Raises:
        ValueError: options are given for a precision that does not scale.
    """
    if precision == "fp16":
        return LossScaler(device_type, **(options or {}))
    if options:
        raise ValueError(
            f"grad_scaler options have no effect with precision {precision!r}: leave them out or use fp16."
        )
    return None
