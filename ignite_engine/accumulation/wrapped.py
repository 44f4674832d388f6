"""An optimizer that wraps another one and delegates to it everything that it does not override."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class WrappedOptimizer(Optimizer):
    """Passes groups, state, hooks and every other attribute on to ``.optimizer``.

    A scheduler accepts it as an optimizer, and may be made over either. It can be copied and pickled, with the
    optimizer inside.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # torch's own initializer is left out: it would make groups and hooks of its own
        self.optimizer = optimizer

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in vars(self):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
