"""What an update reports: a dict in which the mean over a group is computed when it is first read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView, Iterator, ValuesView
from typing import Any

import torch
from torch import Tensor

from ignite_engine.step.losses import weighted


class GroupMean:
    """The weighted sum of one value over the micro-batches of a group."""

    __slots__ = ("_scales", "_values")

    def __init__(self, values: list[Tensor], scales: list[float]) -> None:
        self._values, self._scales = values, scales

    def read(self) -> Tensor:
        """Computed the first time: among the cache misses of a step it costs 35 us, and most are read much later."""
        if self._scales:
            with torch.inference_mode(False):  # who reads it first must not decide what others may do with it
                self._values, self._scales = [weighted(self._values, self._scales)], []
        return self._values[0]


class Reported(dict[str, Any]):
    """A dict of tensors to whoever reads it, copies or pickles it; ``dict.items(reported)`` does not."""

    def _all_read(self) -> Reported:
        for name in self:
            self[name]
        return self

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if type(value) is GroupMean:
            value = value.read()
            super().__setitem__(name, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # its own, so that dict(), update() and ** ask __getitem__

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # this is get

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # dict's is a view of another name
        return super(Reported, self._all_read()).items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]  # likewise
        return super(Reported, self._all_read()).values()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def pop(self, *args: Any) -> Any:
        return super(Reported, self._all_read()).pop(*args)

    def popitem(self) -> tuple[str, Any]:
        return super(Reported, self._all_read()).popitem()

    def setdefault(self, name: str, default: Any = None) -> Any:
        super().setdefault(name, default)
        return self[name]

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:  # dict has one of its own
        return not self == other

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(dict(self).items())  # what torch.load takes with weights_only


def unread(output: dict[str, Any], name: str) -> Any:
    """The value, a :class:`GroupMean` if nobody has read it."""
    return dict.__getitem__(output, name)


def read(value: Any) -> Any:
    """The tensor of a :class:`GroupMean`; anything else as it is."""
    return value.read() if type(value) is GroupMean else value
