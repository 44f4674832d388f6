"""Clipping and the step of optimizers as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ignite_engine.capture.gradients import Graph, compiled

MAX_GRAPHS = 4
"""Of shapes of batches, and of settings of optimizers."""


@dataclass
class _Group:
    """A parameter group as a graph takes it: tensors are inputs, settings are compiled into it."""

    kind: type[Optimizer]
    parameters: list[Tensor]
    gradients: list[Tensor]
    states: dict[str, list[Tensor]]
    lr: Tensor
    settings: dict[str, Any]


_STATES: dict[type[Optimizer], tuple[str, ...]] = {
    AdamW: ("exp_avg", "exp_avg_sq", "step"),
    Adam: ("exp_avg", "exp_avg_sq", "step"),
    SGD: ("momentum_buffer",),
}
_SETTINGS: dict[type[Optimizer], tuple[str, ...]] = {
    AdamW: ("betas", "eps", "weight_decay", "maximize", "amsgrad"),
    Adam: ("betas", "eps", "weight_decay", "maximize", "amsgrad", "decoupled_weight_decay"),
    SGD: ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
}


def why_not(optimizers: Iterable[Optimizer]) -> str | None:
    """Why the step is not captured, as the end of a sentence; None: it is."""
    for optimizer in optimizers:
        if type(optimizer) not in _STATES:
            return f"{type(optimizer).__name__} is none of {', '.join(kind.__name__ for kind in _STATES)}"
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            return "amsgrad is on"
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return "differentiable is on"
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        if any(getattr(optimizer, name, None) for name in hooks):
            return f"{type(optimizer).__name__} has hooks of its step"
    return None


class StepGraph:
    """The joint norm of all gradients, clipping, and the step of every optimizer.

    Args:
        clip_norm: largest joint L2 norm; None does not clip.
        with_norm: return the norm where nothing is clipped, too.
    """

    def __init__(self, clip_norm: float | None, with_norm: bool) -> None:
        self._clip_norm, self._with_norm = clip_norm, with_norm
        self._graphs: dict[tuple[Any, ...], Graph] = {}
        self._rates: dict[tuple[int, int], Tensor] = {}

    def __call__(self, optimizers: Mapping[str, Optimizer]) -> tuple[bool, Tensor | None]:
        """One step of each; the optimizers' states must exist.

        Returns:
            Whether it was done: few settings, other than the LR, are worth a compilation; and the norm before clipping,
            shape ``()``.
        """
        groups = [
            self._group(number, index, optimizer, group)
            for number, optimizer in enumerate(optimizers.values())
            for index, group in enumerate(optimizer.param_groups)
        ]
        groups = [group for group in groups if group.parameters]
        key = tuple((group.kind, len(group.parameters), *group.settings.values()) for group in groups)
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) >= MAX_GRAPHS:
                return False, None
            graph = self._graphs[key] = compiled(_clip_and_step(self._clip_norm, self._with_norm))
        with torch.no_grad():
            norm = graph(
                [group.parameters for group in groups],
                [group.gradients for group in groups],
                [group.states for group in groups],
                [group.lr for group in groups],
                [(group.kind, group.settings) for group in groups],
            )
        return True, norm

    def _group(self, number: int, index: int, optimizer: Optimizer, group: dict[str, Any]) -> _Group:
        kind = type(optimizer)
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [optimizer.state[parameter] for parameter in parameters]
        names = _STATES[kind] if kind is not SGD or group["momentum"] else ()
        # a number would be compiled into the graph, and each value of a schedule would be another graph
        lr = group["lr"]
        if not isinstance(lr, Tensor):
            device = parameters[0].device if parameters else torch.device("cpu")
            rate = self._rates.get((number, index))
            if rate is None or rate.device != device:
                rate = self._rates[number, index] = torch.zeros((), device=device)
            lr = rate.fill_(lr)
        return _Group(
            kind,
            parameters,
            [parameter.grad for parameter in parameters],
            {name: [state[name] for state in states] for name in names},
            lr,
            {name: group[name] for name in _SETTINGS[kind] if name in group},
        )


def _clip_and_step(clip_norm: float | None, with_norm: bool) -> Graph:
    def graph(
        parameters: list[list[Tensor]],
        gradients: list[list[Tensor]],
        states: list[dict[str, list[Tensor]]],
        rates: list[Tensor],
        kinds: list[tuple[type[Optimizer], dict[str, Any]]],
    ) -> Tensor | None:
        norm = None
        if clip_norm is not None or with_norm:
            norms = [torch.linalg.vector_norm(gradient) for group in gradients for gradient in group]
            norm = torch.linalg.vector_norm(torch.stack(norms))
        if clip_norm is not None and norm is not None:
            factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
            gradients = [[gradient * factor for gradient in group] for group in gradients]
        for group in range(len(parameters)):
            kind, settings = kinds[group]
            _STEPS[kind](parameters[group], gradients[group], states[group], rates[group], settings)
        return norm

    return graph


def has_states(optimizers: Iterable[Optimizer]) -> bool:
    """Whether every parameter with a gradient has the state that its optimizer makes in its first step."""
    return all(
        name in optimizer.state[parameter] and optimizer.state[parameter][name] is not None
        for optimizer in optimizers
        for group in optimizer.param_groups
        if type(optimizer) is not SGD or group["momentum"]
        for parameter in group["params"]
        if parameter.grad is not None
        for name in _STATES[type(optimizer)]
    )


def _adam(
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: dict[str, list[Tensor]],
    lr: Tensor,
    settings: dict[str, Any],
) -> None:
    adam(
        parameters,
        gradients,
        states["exp_avg"],
        states["exp_avg_sq"],
        [],
        states["step"],
        foreach=False,
        capturable=True,
        decoupled_weight_decay=settings.get("decoupled_weight_decay", False),
        amsgrad=False,
        beta1=settings["betas"][0],
        beta2=settings["betas"][1],
        lr=lr,
        weight_decay=settings["weight_decay"],
        eps=settings["eps"],
        maximize=settings["maximize"],
    )


def _adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: dict[str, list[Tensor]],
    lr: Tensor,
    settings: dict[str, Any],
) -> None:
    _adam(parameters, gradients, states, lr, {**settings, "decoupled_weight_decay": True})


def _sgd(
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: dict[str, list[Tensor]],
    lr: Tensor,
    settings: dict[str, Any],
) -> None:
    sgd(
        parameters,
        gradients,
        states.get("momentum_buffer", [None] * len(parameters)),  # type: ignore[arg-type]  # without momentum
        foreach=False,
        fused=False,
        weight_decay=settings["weight_decay"],
        momentum=settings["momentum"],
        lr=lr,  # type: ignore[arg-type]  # a tensor is taken, too
        dampening=settings["dampening"],
        nesterov=settings["nesterov"],
        maximize=settings["maximize"],
    )


_STEPS: dict[type[Optimizer], Callable[..., None]] = {AdamW: _adamw, Adam: _adam, SGD: _sgd}
