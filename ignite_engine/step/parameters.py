"""The parameters that are trained."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer


class Parameters:
    """The parameters of several optimizers, read anew at each call, as groups may change during a run."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers

    def all(self) -> list[Tensor]:
        """Each once, in their order."""
        groups = (group for optimizer in self._optimizers.values() for group in optimizer.param_groups)
        return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())

    def clear_gradients(self) -> None:
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
