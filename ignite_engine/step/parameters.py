"""The optimizers by name, and the parameters that they train."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from itertools import chain

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ignite_engine.errors import check_type

logger = logging.getLogger(__name__)


class Parameters:
    """The parameters of several optimizers, read anew at each call, as groups may change during a run."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._known: list[int] = []
        self._ordered: list[Tensor] = []

    def all(self) -> list[Tensor]:
        """Each once, in their order."""
        return list(self._by_id().values())

    def _by_id(self) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                found.update(zip(map(id, group["params"]), group["params"]))
        return found

    def in_order_of(self, model: nn.Module) -> list[Tensor]:
        """The parameters of :meth:`all` in the order of ``model.parameters()``, in which a loop sums up their norm.

        They are in the optimizers' order if one of them is not the model's.
        """
        found = self._by_id()
        if self._known != (known := list(found)):  # those that are known live, so that no other one has their id
            ordered: list[Tensor] = [parameter for parameter in model.parameters() if id(parameter) in found]
            self._ordered = ordered if len(ordered) == len(found) else list(found.values())
            self._known = known
        return self._ordered

    def clear_gradients(self) -> None:
        for parameter in self.all():
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
        # of the class: an LR scheduler of torch patches the instance's with a function that names self
        _, *of_step = inspect.signature(type(one).step).parameters.values()
        if any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in of_step):
            raise ValueError(
                f"{type(one).__name__} needs a closure that computes the loss again, which Update does not give: "
                "give Trainer an update of your own that calls step(closure)."
            )
    return optimizers


def check_model(model: nn.Module) -> None:
    """Check that the model has all of its parameters and buffers, and that its gradients can be reduced.

    Raises:
        ValueError: one is that of a lazy module which has met no batch, or FSDP2 shards a table with sparse gradients.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"model must have all of its values, got {name!r} of a lazy module, which has no values yet: call the "
                "model on a batch before training."
            )
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_table and module.sparse and hasattr(module.weight, "device_mesh"):
            raise ValueError(
                f"{name} ({type(module).__name__}) has sparse gradients, which FSDP2 cannot reduce: use "
                "sparse=False or DistributedDataParallel."
            )


def check_gradients(optimizers: Mapping[str, Optimizer], of_model: Iterable[Tensor]) -> None:
    """After a run's first backward: an optimizer of another model's parameters would train nothing, silently.

    Raises:
        ValueError: none of the optimizers holds a parameter of the model, or one with a gradient. It is a warning where
            some do, and where the loss reached none of the model's own, which hooks or a later step may train.
    """
    known, idle = set(map(id, of_model)), list[str]()
    for name, optimizer in optimizers.items():
        held = Parameters({name: optimizer}).all()
        if held and all(parameter.grad is None and id(parameter) not in known for parameter in held):
            idle.append(f"{name} ({type(optimizer).__name__})")
    message = (
        f"{', '.join(idle)} holds no parameter of the model, and none of its own got a gradient in the first step: "
        "make it from the parameters() of the model that Update is given."
    )
    if idle and len(idle) == len(optimizers):
        raise ValueError(message)
    trained = Parameters(optimizers).all()
    if idle:
        logger.warning("%s", message)  # it may be meant to begin later
    # a hook may step within the backward and drop the gradient
    elif trained and all(p.grad is None and not p._post_accumulate_grad_hooks for p in trained):
        logger.warning(
            "The loss of the first step reached none of the parameters that the optimizers hold: unless it is to reach "
            "them later, compute it from the model that loss_fn is given, and give an optimizer the parameters that it "
            "is computed from."
        )
