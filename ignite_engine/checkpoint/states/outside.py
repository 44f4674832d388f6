"""What a model keeps from one iteration to the next beside its state_dict."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from ignite_engine.checkpoint.states.model_and_optimizer import clean_name, unwrap


class Outside:
    """Numbers, texts and tensors that modules hold and no state_dict has, as they were when this was made.

    Of torch's own modules buffers only, and no module that writes its own ``get_extra_state()``.
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
        """Their names."""
        return [label for label, holder, name, mark in self._held if _differs(holder.get(name), mark)]


_OF_EACH_MODULE = vars(nn.Module()).keys()


def _is_kept(value: Any) -> bool:
    """A tensor of a graph belongs to its iteration."""
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
