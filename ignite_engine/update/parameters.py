"""The optimizers by name, the parameters that they train, and the norm of the gradients of these."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from ignite_engine.errors import check_type
from ignite_engine.update.losses import whole

logger = logging.getLogger(__name__)


class Parameters:
    """The parameters of several optimizers, read anew at each call, as groups may change during a run."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._known: list[int] = []
        self._ordered: list[Tensor] = []

    def all(self) -> list[Tensor]:
        """Each once, in their order."""
        found: dict[int, Tensor] = {}
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                found.update(zip(map(id, group["params"]), group["params"]))
        return list(found.values())

    def in_order_of(self, model: nn.Module) -> list[Tensor]:
        """The parameters of :meth:`all` in the order of ``model.parameters()``, in which a loop sums up their norm.

        They are in the optimizers' order if one of them is not the model's.
        """
        found = self.all()
        if self._known != (known := list(map(id, found))):  # they live, so that no other one has their id
            ids = set(known)
            ordered: list[Tensor] = [parameter for parameter in model.parameters() if id(parameter) in ids]
            self._known, self._ordered = known, ordered if len(ordered) == len(found) else found
        return self._ordered

    def clear_gradients(self) -> None:
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


class _Gradient(NamedTuple):
    """Stands in for a parameter, as torch clips the ``grad`` of what it is given."""

    grad: Any


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their joint L2 norm is at most ``max_norm``; None: leave them as they are.

    The bits are those of ``torch.nn.utils.clip_grad_norm_``, which refuses sparse gradients and several device meshes.
    Sparse ones count by their coalesced values, as an index twice in the batch is one row, and are coalesced in place
    where they are scaled; sharded ones (DTensor) count by the whole tensor, which is a collective.

    Args:
        parameters: those without a gradient are ignored.
        max_norm: in the units of the unscaled loss; call after ``scaler.unscale_``.

    Returns:
        The norm before clipping, shape ``()``, on the gradients' device, in the widest dtype (no host sync); zero on
        the CPU where there is none.

    Raises:
        ValueError: ``max_norm`` is not positive.

    Source: Pascanu et al. 2013, arXiv 1211.5063, section 3.2.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}.")
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            if max_norm is not None:
                parameter.grad = gradient
            gradient = gradient.values()
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = list(map(get_total_norm, by_mesh.values()))
    if [*by_mesh] != [None]:
        norms = list(map(whole, norms))
    norm = norms[0] if len(norms) == 1 else get_total_norm(norms)
    # torch's factor is a product with a rounded reciprocal: where it would be 1 for certain, nothing is scaled
    is_below = norm.is_cpu and norm.item() * (1.0 + 2.0 * torch.finfo(norm.dtype).eps) + 1e-5 <= (max_norm or 0.0)
    if max_norm is not None and not is_below:
        for gradients in by_mesh.values():  # torch's foreach takes no mix of them
            stand_ins: list[Any] = list(map(_Gradient, gradients))
            clip_grads_with_norm_(stand_ins, max_norm, norm)
    return norm


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
        ValueError: no optimizer holds a parameter of the model, or one with a gradient. Otherwise an optimizer of which
            nothing got a gradient is a warning, as it may be meant to begin later.
    """
    held = {name: Parameters({name: optimizer}).all() for name, optimizer in optimizers.items()}
    # a hook may step within the backward and drop the gradient
    idle = [
        f"{name} ({type(optimizers[name]).__name__})"
        for name, parameters in held.items()
        if parameters and all(p.grad is None and not p._post_accumulate_grad_hooks for p in parameters)
    ]
    message = (
        f"{', '.join(idle)}: no parameter got a gradient in the first step: make an optimizer from the parameters() of "
        "the model that Update is given, and compute the loss from that model."
    )
    if len(idle) == len(held) and set(map(id, of_model)).isdisjoint(map(id, chain(*held.values()))):
        raise ValueError(message)
    if idle:
        logger.warning("%s", message)
