"""The optimizers by name, and the parameters that they train."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ignite_engine.errors import check_type

logger = logging.getLogger(__name__)


class Parameters:
    """The parameters of several optimizers, read anew at each call, as groups may change during a run."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._known: list[Tensor] = []
        self._ordered: list[Tensor] = []

    def all(self) -> list[Tensor]:
        """Each once, in their order."""
        groups = (group for optimizer in self._optimizers.values() for group in optimizer.param_groups)
        return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())

    def in_order_of(self, model: nn.Module) -> list[Tensor]:
        """The parameters of :meth:`all` in the order of ``model.parameters()``, in which a loop sums up their norm.

        They are in the optimizers' order if one of them is not the model's.
        """
        parameters = self.all()
        if len(parameters) != len(self._known) or not all(map(is_, parameters, self._known)):
            places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
            are_the_models = all(id(parameter) in places for parameter in parameters)
            self._known, self._ordered = parameters, parameters
            if are_the_models:
                self._ordered = sorted(parameters, key=lambda parameter: places[id(parameter)])
        return self._ordered

    def clear_gradients(self) -> None:
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


def optimizers_by_name(optimizer: Optimizer | Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """The optimizers by name; a single one is called ``optimizer``.

    Raises:
        ValueError: there is none, or one needs a closure.
        TypeError: something is no optimizer.
    """
    optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}
    if not optimizers:
        raise ValueError("optimizer must hold at least one optimizer, got an empty mapping.")
    for name, one in optimizers.items():
        check_type("an optimizer's name", name, isinstance(name, str), "a word")
        label = f"optimizer[{name!r}]" if isinstance(optimizer, Mapping) else "optimizer"
        is_optimizer = hasattr(one, "param_groups") and hasattr(one, "step")
        check_type(label, one, is_optimizer, "an optimizer, or a mapping of names to several")
        if _needs_closure(one):
            raise ValueError(
                f"{type(one).__name__} needs a closure that computes the loss again, which Update does not give: "
                "give Trainer an update of your own that calls step(closure)."
            )
    return optimizers


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot be called without a closure that computes the loss again, as LBFGS's."""
    # of the class: an LR scheduler of torch patches the instance's with a function that names self
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind in positional and parameter.default is inspect.Parameter.empty for parameter in parameters
    )


def refuse_lazy(model: nn.Module) -> None:
    """Check that the model has all of its parameters and buffers.

    Raises:
        ValueError: one is that of a lazy module which has met no batch.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"model must have all of its values, got {name!r} of a lazy module, which has no values yet: call the "
                "model on a batch before training."
            )


def check_gradients(optimizers: Mapping[str, Optimizer], of_model: Iterable[Tensor]) -> None:
    """After a run's first backward: an optimizer of another model's parameters would train nothing, silently.

    Raises:
        ValueError: none of the optimizers holds a parameter of the model, or one with a gradient. It is a warning where
            some do, and where the loss reached none of the model's own, which hooks or a later step may train.
    """
    known = {id(parameter) for parameter in of_model}
    idle = []
    for name, optimizer in optimizers.items():
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if held and all(parameter.grad is None and id(parameter) not in known for parameter in held):
            idle.append(f"{name} ({type(optimizer).__name__})")
    if idle:
        message = (
            f"{', '.join(idle)} holds no parameter of the model, and none of its own got a gradient in the first "
            "step: make it from the parameters() of the model that Update is given."
        )
        if len(idle) == len(optimizers):
            raise ValueError(message)
        logger.warning("%s", message)  # it may be meant to begin later
    elif not any(map(_may_have_been_trained, parameters := Parameters(optimizers).all())) and parameters:
        logger.warning(
            "The loss of the first step reached none of the parameters that the optimizers hold: unless it is to reach "
            "them later, compute it from the model that loss_fn is given, and give an optimizer the parameters that it "
            "is computed from."
        )


def _may_have_been_trained(parameter: Tensor) -> bool:
    # such a hook may step within the backward and drop the gradient
    return parameter.grad is not None or bool(parameter._post_accumulate_grad_hooks)
