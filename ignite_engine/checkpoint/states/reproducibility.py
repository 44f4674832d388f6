"""The reproducibility report: reasons why a run resumed from the present state would not be bit-exact."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ReferenceType

from torch import Tensor
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ignite_engine import devices
from ignite_engine.checkpoint.nested import walk
from ignite_engine.checkpoint.states.metrics import MetricState
from ignite_engine.checkpoint.states.model_and_optimizer import OptimizerState
from ignite_engine.checkpoint.states.registry import Registry
from ignite_engine.errors import shortened
from ignite_engine.ranks.ddp import data_parallel, unsettled_buckets

if TYPE_CHECKING:
    from ignite_engine.checkpoint.part_names import SaveFilter

_WITH_PARAMETERS = frozenset(("model", "parameters"))
_WITHOUT_MEMORY = (type(None), int, float, str, ProcessGroup, ReferenceType)
"""Types of hook states that do not change; one of DDP's own hooks has a reference to DDP."""


class Source(Protocol):
    """The data of a run."""

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not get the same batches; None if it would."""

    @property
    def changed(self) -> str | None:
        """How the data differs from the data of the saved run, as a sentence; None if it does not."""


def reasons_of(
    model: Any,
    used: Mapping[str, Any],
    registry: Registry,
    source: Source | None,
    models: Collection[Any],
    filters: Iterable[SaveFilter],
) -> list[str]:
    """The reasons; empty if a resumed run would be bit-exact.

    Args:
        model: the update's model, if it has one.
        used: objects that the update uses, by name.
        models: all models of the update and the registry.
        filters: those of the checkpoint handlers.
    """
    reasons = _of_states(registry)
    if registry.filters:  # only if checkpoints are saved
        reasons += _unsaved_of(used, registry)
    if source is not None and source.inexact is not None:
        reasons.append(source.inexact)
    if source is not None and source.changed is not None:
        reasons.append(source.changed.rstrip("."))
    reasons += [reason for model in models if (reason := unsettled_buckets(model)) is not None]
    reasons += _unsaved_of_hooks(models, registry)
    reasons += _of_kernels(models)
    return reasons + [reason for left_out in filters for reason in left_out.reasons(registry.capture, registry.kinds)]


def _of_kernels(models: Collection[Any]) -> list[str]:
    kinds = {first.device.type for model in models if (first := next(model.parameters(), None)) is not None}
    return [
        f"kernels of {kind} may add in an order that changes from run to run (run.deterministic, or "
        "torch.use_deterministic_algorithms, has those that do not)"
        for kind in sorted(kinds)
        if devices.sums_may_change(kind)
    ]


def _of_states(registry: Registry) -> list[str]:
    """Reasons in the registered states: some are missing, or differ from those of an uninterrupted run."""
    found = [*registry.resumed_otherwise, *(f"{name} is attached but not saved" for name in registry.nameless)]
    if registry.rank_digests is not None:
        found += registry.rank_digests.reasons()
    if registry.filters and not _holds_parameters(registry):
        found.append("no parameters are saved, as no model is registered (trainer.register(name, model) saves one)")
    for name, obj in registry.objects.items():
        if isinstance(obj, MetricState) and (why := obj.unsupported_reason()) is not None:
            found.append(f"{name} is not saved, as {why}, which is not plain data")
        if isinstance(why := getattr(obj, "outside_of_run", None), str):
            found.append(f"{name} {why}")
        if isinstance(obj, OptimizerState) and (unsaved := obj.unsaved()):
            found.append(f"{name} trains {shortened(unsaved)}, not the model's, without saving their values")
    return found


def _holds_parameters(registry: Registry) -> bool:
    if not _WITH_PARAMETERS.isdisjoint(registry.kinds.values()):
        return True
    own = (obj for name, obj in registry.objects.items() if name not in ("trainer", "data", "rng"))
    return any(isinstance(leaf, Tensor) for obj in own for _, leaf in walk(obj.state_dict()))


def _unsaved_of(used: Mapping[str, Any], registry: Registry) -> list[str]:
    """One reason per unregistered optimizer or loss scaler that a custom ``update`` uses."""
    objects = registry.objects.values()
    saved = [registered.optimizer if isinstance(registered, OptimizerState) else registered for registered in objects]
    return [
        f"{name} ({type(obj).__name__}) of the update is not saved (trainer.register({name!r}, {name}, shared=True))"
        for name, obj in used.items()
        if isinstance(obj, Optimizer) or (isinstance(obj, GradScaler) and obj.is_enabled())
        if not any(obj is registered for registered in saved)
    ]


def _unsaved_of_hooks(models: Collection[Any], registry: Registry) -> list[str]:
    """One reason per user-defined communication hook with a state that no registered object holds."""
    found = {id(ddp): ddp for model in models for ddp in data_parallel(model)}.values()
    states = [state for ddp in found if ddp.mixed_precision is None for _, state in getattr(ddp, "_comm_hooks", ())]
    states = [state for state in states if not isinstance(state, _WITHOUT_MEMORY)]
    saved = [part for obj in registry.objects.values() for part in (obj, *getattr(obj, "__dict__", {}).values())]
    return [
        f"the state of DistributedDataParallel's communication hook ({type(state).__name__}) is not saved"
        for state in states
        if not any(state is part for part in saved)
    ]
