"""The state of Ignite metrics as plain data, to be saved in mid-epoch and restored in another process.

In Ignite 0.5.5, the ``state_dict`` of a metric lacks attributes (MutualInformation) or cannot be loaded (EpochMetric,
so ROC_AUC and others). Here every attribute that can change is captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from ignite.engine import Engine
from ignite.metrics import Frequency, Metric
from torch import Tensor

from ignite_engine.checkpoint.nested import TooDeep, rebuilt, walk
from ignite_engine.checkpoint.pack import Pack
from ignite_engine.errors import CheckpointError

_DEVICE, _TENSOR = "__device__", "__tensor__"


def metrics_of(engine: Engine) -> dict[str, Metric]:
    """The metrics that are attached to ``engine``, by name; not those inside another metric."""
    metrics: dict[str, Metric] = {}
    unnamed: dict[int, Metric] = {}
    for handlers in engine._event_handlers.values():
        for handler, arguments, _ in handlers:
            metric = _metric_of(handler)
            if metric is not None:
                words = [argument for argument in arguments if isinstance(argument, str)]
                if words:
                    metrics[words[0]] = metric
                else:
                    unnamed[id(metric)] = metric
    covered = {id(inner) for metric in metrics.values() for inner in inner_metrics(metric)}
    left = [metric for key, metric in unnamed.items() if key not in covered]
    return metrics | {f"unnamed {index} {type(metric).__name__}": metric for index, metric in enumerate(left)}


def unsupported_reason(metric: Metric) -> str | None:
    """Why the state of a metric cannot be saved, as the end of a sentence; None if it can."""
    for name, value in _changeable(metric):
        try:
            for inner in _metrics_in(value):
                if (reason := unsupported_reason(inner)) is not None:
                    return reason
            Pack({name: _packed(value)})  # refuses it
        except (CheckpointError, TooDeep):
            kind = type(value)
            return f"{type(metric).__name__} keeps a {kind.__module__}.{kind.__qualname__} in {name}"
    return None


def capture(metric: Metric) -> dict[str, Any]:
    """The state of ``metric`` on this rank as plain data with CPU tensors; not a copy."""
    return {name: _packed(value) for name, value in _changeable(metric)}


def restore(metric: Metric, state: Mapping[str, Any]) -> None:
    """Restore a state from :func:`capture`; tensors return to their type of device."""
    for name, value in state.items():
        setattr(metric, name, _unpacked(value, getattr(metric, name, None)))


class MetricState:
    """A metric's part of a checkpoint, one for each rank; empty if the metric's state cannot be saved.

    A :class:`~ignite.metrics.Frequency` starts over, as it holds clock readings.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric

    def unsupported_reason(self) -> str | None:
        return None if isinstance(self.metric, Frequency) else unsupported_reason(self.metric)

    def state_dict(self) -> dict[str, Any]:
        return {} if unsupported_reason(self.metric) is not None else capture(self.metric)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore(self.metric, state)


def _metric_of(handler: Any) -> Metric | None:
    """The metric whose method a handler is, also inside the wrapper of an event filter."""
    while handler is not None:
        owner = getattr(handler, "__self__", None)
        if isinstance(owner, Metric):
            return owner
        handler = getattr(handler, "__wrapped__", None)
    return None


def _changeable(metric: Metric) -> Iterator[tuple[str, Any]]:
    for name, value in vars(metric).items():
        is_code = callable(value) and not hasattr(value, "compute")  # a loss function or transform, not torchmetrics
        if not (is_code or isinstance(value, torch.device | Engine)):
            yield name, value


def inner_metrics(metric: Metric) -> Iterator[Metric]:
    """``metric`` and all metrics inside it."""
    yield metric
    for _, value in _changeable(metric):
        for inner in _metrics_in(value):
            yield from inner_metrics(inner)


def _metrics_in(value: Any) -> Iterator[Metric]:
    return (leaf for _, leaf in walk(value) if isinstance(leaf, Metric))


def _packed(value: Any) -> Any:
    return rebuilt(value, _packed_leaf)


def _packed_leaf(value: Any) -> Any:
    if isinstance(value, Metric):
        return capture(value)
    if isinstance(value, Tensor):
        value = value.detach()
        return value if value.device.type == "cpu" else {_DEVICE: value.device.type, _TENSOR: value.cpu()}
    return value


def _unpacked(value: Any, present: Any) -> Any:
    """Restore a packed value; metrics in ``present``, the current value, are kept and restored in place."""
    if isinstance(present, Metric):
        restore(present, value)
        return present
    if type(value) is dict:
        if _TENSOR in value:
            return value[_TENSOR].to(value[_DEVICE])
        current = present if isinstance(present, dict) else {}
        return {key: _unpacked(element, current.get(key)) for key, element in value.items()}
    if type(value) in (list, tuple):
        same = isinstance(present, list | tuple) and len(present) == len(value)
        return type(value)(
            _unpacked(element, current)
            for element, current in zip(value, present if same else [None] * len(value), strict=True)
        )
    return value
