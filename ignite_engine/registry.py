"""What a checkpoint holds: every object with a state, by its stable name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ignite.metrics import Metric
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine import agreement
from ignite_engine.checkpointing import LoadPlan, LoadTable, SaveFilter, find_source, prepare, read_source
from ignite_engine.checkpointing.contents import filled
from ignite_engine.checkpointing.errors import StateMismatch as StateMismatch
from ignite_engine.checkpointing.patterns import shortened

logger = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved: its state is made of tensors, numbers, strings, lists, tuples and dicts."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Registry:
    """Names and their objects; and, after a resume, the loaded states that no object has claimed yet."""

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}
        self.shared: set[str] = set()
        self.unsaved: list[str] = []
        self._metrics: list[tuple[Metric, Any]] = []
        self.waiting: dict[str, Any] = {}
        self.resumed_from: str | None = None
        self.filters: list[SaveFilter] = []
        """What the attached checkpoint handlers leave out."""
        self._left_out: Mapping[str, Sequence[str]] = {}

    def register(self, name: str, obj: Any, *, shared: bool = False) -> None:
        """Put ``obj`` into every checkpoint under ``name``; load it at once if a resumed checkpoint has it.

        Args:
            shared: its state is the same on every rank, so one copy is saved.

        Raises:
            TypeError: it has no ``state_dict`` and ``load_state_dict``.
            ValueError: another object has this name.
        """
        if not isinstance(obj, Stateful):
            raise TypeError(
                f"register({name!r}) needs an object with state_dict and load_state_dict, got {type(obj).__name__}."
            )
        if self.objects.get(name, obj) is not obj:
            raise ValueError(
                f"The name {name!r} is taken by a {type(self.objects[name]).__name__}: give this one its own name."
            )
        self.objects[name] = obj
        if shared:
            self.shared.add(name)
        if name in self.waiting:
            self.load_one(name, self.waiting.pop(name), self._left_out)

    def adopt(self, obj: Any, args: tuple[Any, ...]) -> None:
        """Register an object that was attached without ``register``, under its ``name`` or that of its class.

        A metric goes by the name that it is attached under. One whose name is taken stays out and is named in the
        exactness report, unless it has a ``name`` of its own: then two of a kind were given the same, which is an
        error.
        """
        words = [str(arg) for arg in args if isinstance(arg, str)]
        if isinstance(obj, Metric) and not words:
            return  # of its several handlers one brings the name
        if any(known is obj for known in self.objects.values()) or isinstance(obj, (nn.Module, Optimizer)):
            return
        own = getattr(obj, "name", None)
        if isinstance(own, str):
            self.register(own, obj)
            return
        kind = type(obj)
        label = "/".join([kind.__module__.split(".")[0], kind.__name__, *words])
        if label in self.objects:
            self.unsaved.append(label)
        else:
            self.register(label, obj)

    def kind(self, name: str, obj: Any) -> str:
        """What a person calls the object."""
        inner = getattr(obj, "model", None) if isinstance(obj, ModelState) else getattr(obj, "optimizer", None)
        return type(inner if inner is not None else obj).__name__ if name not in ("data", "rng") else name

    def capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """States of the shared objects, and of this rank's own."""
        shared = {name: obj.state_dict() for name, obj in self.objects.items() if name in self.shared}
        local = {name: obj.state_dict() for name, obj in self.objects.items() if name not in self.shared}
        return shared, local

    def load(
        self,
        states: Mapping[str, Any],
        *,
        source: str,
        ignore: Iterable[str] = (),
        left_out: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Load every state whose object is registered; the others wait for theirs.

        Args:
            left_out: names that were left out when it was saved, by part; they stay as they were built.
        """
        ignored = set(ignore)
        unknown = ignored - set(states)
        if unknown:
            raise ValueError(f"resume(ignore=...) names {sorted(unknown)}, but {source} holds {sorted(states)}.")
        self._take({name: state for name, state in states.items() if name not in ignored}, source, left_out)
        fresh = sorted(set(self.objects) - set(states))
        if fresh:
            logger.warning("%s holds no state of %s: they start fresh.", source, ", ".join(fresh))
        for part, names in (left_out or {}).items():
            if part in states and part not in ignored:
                what = f"{part} ({len(names)}: {shortened(names)})"
                logger.warning("%s was saved without some of %s: they stay as they are.", source, what)

    def begin_from(self, path: str | Path, plan: LoadPlan) -> LoadTable:
        """Load what a plan takes from a checkpoint that is not this run's; a collective.

        Args:
            path: a checkpoint, or a folder of which rank 0's newest valid one is taken on all ranks, or a file of
                weights.
            plan: the same on all ranks.

        Raises:
            CheckpointError, StateMismatch, ValueError: one line, on all ranks the same; nothing was loaded.
        """
        chosen = agreement.agreed(lambda: find_source(path) if agreement.rank() == 0 else None)[0]
        assert chosen is not None
        rank = agreement.rank()

        def prepared() -> tuple[dict[str, Any], LoadTable]:
            found = read_source(chosen, rank)
            return prepare(plan, found.parts, self.objects, source=str(chosen), left_out=found.left_out)

        outcome: list[tuple[dict[str, Any], LoadTable]] = []
        agreement.agreed(lambda: outcome.append(prepared()))
        states, table = outcome[0]
        self._take(states, str(chosen))
        logger.log(logging.INFO if table.complete else logging.WARNING, "%s", table)
        return table

    def load_one(self, name: str, state: Any, left_out: Mapping[str, Sequence[str]]) -> None:
        """Load one registered object; names that were left out when its state was saved stay as they are."""
        if names := left_out.get(name):
            state = filled(state, self.objects[name].state_dict(), names)
        obj = self.objects[name]
        obj.load_state_dict(state)
        if isinstance(obj, Metric):
            self._metrics.append((obj, state))

    def keep_metrics(self) -> None:
        """Keep what Ignite's metrics hold now, for a run that goes on in this process; a collective."""
        self._metrics = [(each, each.state_dict()) for each in self.objects.values() if isinstance(each, Metric)]

    def restore_metrics(self, *, last: bool) -> None:
        """Load Ignite's metrics again: they reset themselves when a run or an epoch starts, one that goes on too.

        Args:
            last: nothing resets them any more before they go on.
        """
        for metric, state in self._metrics:
            metric.load_state_dict(state)
        if last:
            self._metrics = []

    def _take(
        self, states: Mapping[str, Any], source: str, left_out: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.resumed_from, self.waiting, self._left_out = source, dict(states), left_out or {}
        for name in [name for name in self.waiting if name in self.objects]:
            self.load_one(name, self.waiting.pop(name), self._left_out)

    def check_all_claimed(self) -> None:
        """Refuse to go on while a loaded state has no object.

        Raises:
            StateMismatch: names both sides and the remedy.
        """
        if self.waiting:
            raise StateMismatch(
                f"{self.resumed_from} holds {sorted(self.waiting)}, for which nothing is registered "
                f"(registered: {sorted(self.objects)}): attach what is missing, or leave it out with "
                f"resume(ignore={sorted(self.waiting)})."
            )


def clean_name(name: str) -> str:
    """A parameter's name without what torch.compile puts into it; :func:`unwrap` sees to DDP."""
    return name.replace("_orig_mod.", "")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own model inside DDP and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "no_sync"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class ModelState:
    """A model's state under names that don't depend on its wrapping."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.held: Mapping[str, Tensor] = {}
        """The model's own values by name, while others stand in their place for an evaluation."""

    def state_dict(self) -> dict[str, Any]:
        state = {clean_name(name): value for name, value in unwrap(self.model).state_dict().items()}
        return {name: self.held.get(name, value) for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load by name.

        Raises:
            StateMismatch: names or shapes are others than those saved.
        """
        model = unwrap(self.model)
        own = {clean_name(name): name for name in model.state_dict()}
        try:
            model.load_state_dict({own.get(name, name): value for name, value in state.items()})
        except RuntimeError as error:  # torch's has a line for each parameter
            differences = _differences(self.state_dict(), state)
            if not differences:
                raise
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise StateMismatch(
                f"The model is not the saved one ({'; '.join(differences[:3])}{more}): build it as it was saved, or "
                "start a run in a new folder."
            ) from error


def _differences(here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """In which names and shapes two states of a model differ."""
    shapes = [{name: tuple(getattr(value, "shape", ())) for name, value in state.items()} for state in (here, saved)]
    return [
        f"{name} is {shapes[0].get(name, 'missing')}, saved {shapes[1].get(name, 'without it')}"
        for name in {**shapes[0], **shapes[1]}
        if shapes[0].get(name) != shapes[1].get(name)
    ]


class OptimizerState:
    """An optimizer's state keyed by parameter names instead of positions; sparse optimizers too."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer, self.model = optimizer, model

    def _names(self) -> list[str]:
        """Names in the order of the optimizer's own numbering."""
        known = {id(parameter): clean_name(name) for name, parameter in unwrap(self.model).named_parameters()}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [known.get(id(parameter), f"unnamed.{index}") for index, parameter in enumerate(parameters)]

    def state_dict(self) -> dict[str, Any]:
        state, names = self.optimizer.state_dict(), self._names()
        groups = [group | {"params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
        return {"state": {names[index]: value for index, value in state["state"].items()}, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load by name.

        Raises:
            StateMismatch: the groups hold other parameters than those saved.
        """
        index_of = {name: index for index, name in enumerate(self._names())}
        saved = [set(group["params"]) for group in state["param_groups"]]
        names = iter(self._names())
        here = [{next(names) for _ in group["params"]} for group in self.optimizer.param_groups]
        if saved != here:
            different = sorted(set().union(*saved) ^ set().union(*here))[:5]
            raise StateMismatch(
                f"The optimizer's {len(here)} parameter groups are not the {len(saved)} saved ones "
                f"(in one only: {different or 'none, they are grouped otherwise'}): build the same groups, "
                "or leave the optimizer out with resume(ignore=['optimizer'])."
            )
        ours = iter(index_of[name] for name in self._names())
        groups = []
        for group, own in zip(state["param_groups"], self.optimizer.param_groups, strict=True):
            groups.append({**group, "params": [next(ours) for _ in own["params"]]})
        numbered = {index_of[name]: value for name, value in state["state"].items()}
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})
