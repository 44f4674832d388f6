"""Detects state that a model keeps between iterations but not in its state_dict."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from ignite_engine.checkpoint.states.model_and_optimizer import clean_name, unwrap


class Outside:
    """The numbers, strings and tensors that modules hold outside of their state_dict, as they were at construction.

    Torch's own modules count with their buffers only; modules with a ``get_extra_state()`` do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[str, dict[str, Any], str, Any]] = []
        for path, module in unwrap(model).named_modules():
            kind = type(module)
            attributes = vars(module) if kind.get_extra_state is nn.Module.get_extra_state else {}
            own = [] if kind.__module__.startswith("torch.") else [*(attributes.keys() - _OF_EACH_MODULE)]
            for holder, names in ((attributes, sorted(own)), (module._buffers, module._non_persistent_buffers_set)):
                for name in names:
                    if _is_kept(value := holder.get(name)):
                        label = clean_name(f"{path}.{name}".lstrip("."))
                        self._held.append((label, holder, name, _mark(value)))

    def changed(self) -> list[str]:
        """The names of those that have changed since."""
        return [label for label, holder, name, mark in self._held if _differs(holder.get(name), mark)]


_OF_EACH_MODULE = vars(nn.Module()).keys()


def _is_kept(value: Any) -> bool:
    """Whether a value may carry state; a tensor in a graph belongs to its iteration."""
    if isinstance(value, Tensor):
        return value.grad_fn is None and not value.is_inference()
    return isinstance(value, bool | int | float | str | None)


def _mark(value: Any) -> Any:
    return (weakref.ref(value), value._version) if isinstance(value, Tensor) else value


def _differs(value: Any, mark: Any) -> bool:
    if not _is_kept(value):
        return False
    if isinstance(value, Tensor):
        return not isinstance(mark, tuple) or value is not mark[0]() or value._version != mark[1]
    return bool(value != mark)
