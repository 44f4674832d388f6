"""Clipping and the step of optimizers as one graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ignite_engine.ext.capture.compiling import Graph, call, compiled, not_captured

_ADAM = (
    ("exp_avg", "exp_avg_sq", "step"),
    ("betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay"),
)
_SGD = (("momentum_buffer",), ("momentum", "dampening", "weight_decay", "nesterov", "maximize"))
_KINDS: dict[type[Optimizer], tuple[tuple[str, ...], tuple[str, ...]]] = {AdamW: _ADAM, Adam: _ADAM, SGD: _SGD}
"""By class the names of its states and of its settings."""


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse what :class:`StepGraph` does not know.

    Raises:
        ValueError: an optimizer is of another kind, is set otherwise, has hooks, or shares a parameter with another.
    """
    trained = list[int]()
    for optimizer in optimizers:
        if type(optimizer) not in _KINDS:
            raise not_captured(f"{type(optimizer).__name__} is none of {', '.join(kind.__name__ for kind in _KINDS)}")
        replaced = optimizer.__dict__.get("step")
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        # a scheduler of torch puts a step in its place that only counts
        if any(hooks) or (replaced is not None and not getattr(replaced, "_wrapped_by_lr_sched", False)):
            raise not_captured(f"the step of {type(optimizer).__name__} has hooks, or was replaced")
        for group in optimizer.param_groups:
            if group.get("amsgrad") or group.get("differentiable"):
                raise not_captured("amsgrad or differentiable is on")
            trained += map(id, group["params"])
    if len({*trained}) < len(trained):
        raise not_captured("two optimizers train one parameter")


class StepGraph:
    """The joint norm of all gradients, clipping, and the step of every optimizer.

    Args:
        clip_norm: largest joint L2 norm; None does not clip.
        with_norm: return the norm where nothing is clipped, too.
    """

    def __init__(self, clip_norm: float | None, with_norm: bool) -> None:
        self._clip_norm, self._with_norm = clip_norm, with_norm
        self._graphs: dict[tuple[Any, ...], Graph] = {}
        self._rates: dict[tuple[int, int], tuple[float, Tensor]] = {}

    def __call__(self, optimizers: Mapping[str, Optimizer]) -> tuple[bool, Tensor | None]:
        """One step of each.

        Returns:
            Whether it was done: not where an optimizer has yet to make its states; and the norm before clipping, shape
            ``()``.
        """
        groups, rates, key = list[list[list[Tensor]]](), list[Tensor](), list[Any]()
        for number, optimizer in enumerate(optimizers.values()):
            kind, state = type(optimizer), optimizer.state
            names, settings = _KINDS[kind]
            for index, group in enumerate(optimizer.param_groups):
                parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
                if not parameters:
                    continue
                tensors = [parameters, [parameter.grad for parameter in parameters]]
                if kind is not SGD or group["momentum"]:
                    states = [state.get(parameter, {}) for parameter in parameters]
                    tensors += [[state.get(name) for state in states] for name in names]
                    if any([tensor is None for moments in tensors[2:] for tensor in moments]):
                        return False, None
                groups.append(tensors)
                rates.append(self._rate((number, index), group["lr"], parameters[0].device))
                key.append((kind, len(parameters), *[group.get(name) for name in settings]))
        signature = tuple(key)
        graph = self._graphs.get(signature)
        with torch.no_grad():
            if graph is None:
                graph = compiled(_clip_and_step(self._clip_norm, self._with_norm, key), rates[0].device.type)
                self._graphs[signature] = graph
            return True, call(graph, groups, rates)

    def _rate(self, place: tuple[int, int], lr: float | Tensor, device: torch.device) -> Tensor:
        # a number would be compiled into the graph, and each value of a schedule would be another graph
        if isinstance(lr, Tensor):
            return lr
        last = self._rates.get(place)
        if last is None or last[0] != lr or last[1].device != device:
            last = self._rates[place] = lr, torch.full((), lr, device=device)
        return last[1]


def _clip_and_step(clip_norm: float | None, with_norm: bool, kinds: Sequence[tuple[Any, ...]]) -> Graph:
    settings = [(kind, dict(zip(_KINDS[kind][1], values, strict=True))) for kind, _, *values in kinds]

    def graph(groups: list[list[list[Tensor]]], rates: list[Tensor]) -> Tensor | None:
        norm = None
        gradients = [group[1] for group in groups]
        if clip_norm is not None or with_norm:
            norms = [torch.linalg.vector_norm(gradient) for group in gradients for gradient in group]
            norm = torch.linalg.vector_norm(torch.stack(norms))
        if clip_norm is not None and norm is not None:
            factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
            gradients = [[gradient * factor for gradient in group] for group in gradients]
        for index, (kind, values) in enumerate(settings):
            parameters, _, *states = groups[index]
            given: dict[str, Any] = {"lr": rates[index], "foreach": False, **values}
            if kind is SGD:
                momenta: Any = states[0] if states else [None] * len(parameters)  # without momentum
                sgd(parameters, gradients[index], momenta, fused=False, **given)
            else:
                averages, squares, steps = states
                beta1, beta2 = given.pop("betas")
                given.update(beta1=beta1, beta2=beta2, amsgrad=False, capturable=True)
                adam(parameters, gradients[index], averages, squares, [], steps, **given)
        return norm

    return graph
