"""What a checkpoint holds: every object with a state, by its stable name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ignite.metrics import Metric
from torch import nn
from torch.optim import Optimizer

from ignite_engine.checkpointing import (
    CheckpointStore,
    Loaded,
    LoadPlan,
    LoadTable,
    SaveFilter,
    find_source,
    prepare,
    read_source,
    require_exact,
)
from ignite_engine.checkpointing.environment import environment_values, inexact_reasons
from ignite_engine.checkpointing.load.part_names import filled
from ignite_engine.errors import StateMismatch, leave_out, shortened
from ignite_engine.ranks import agreement
from ignite_engine.states.metrics import MetricState
from ignite_engine.states.model_and_optimizer import ModelState, OptimizerState

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
        self._kept: list[tuple[MetricState, Any]] = []
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
        if isinstance(obj, Metric):
            obj = next((each for each in self._metrics() if each.metric is obj), None) or MetricState(obj)
        if self.objects.get(name, obj) is not obj:
            raise ValueError(
                f"The name {name!r} is taken by a {self.kind(name, self.objects[name])}: give this one its own name."
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
        if self.holds(obj) or isinstance(obj, (nn.Module, Optimizer)):
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

    def holds(self, obj: object) -> bool:
        """Whether ``obj`` is registered, by itself or as the metric that it is."""
        return any(each is obj for each in (*self.objects.values(), *(each.metric for each in self._metrics())))

    def kind(self, name: str, obj: Any) -> str:
        """What a person calls the object."""
        wrapped = {ModelState: "model", OptimizerState: "optimizer", MetricState: "metric"}.get(type(obj), "")
        return name if name in ("data", "rng") else type(getattr(obj, wrapped, obj)).__name__

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
            ignore: parts that are not loaded.
            left_out: names that were left out when it was saved, by part; they stay as they were built.
        """
        ignored = set(ignore)
        unknown = ignored - set(states)
        if unknown:  # no error: the same program resumes from its own checkpoints, which don't hold them any more
            held = ", ".join(sorted(states))
            logger.warning("%s holds no %s to leave out; it holds %s.", source, ", ".join(sorted(unknown)), held)
        self._take({name: state for name, state in states.items() if name not in ignored}, source, left_out)
        fresh = sorted(set(self.objects) - set(states))
        if fresh:
            logger.warning("%s holds no state of %s: they start fresh.", source, ", ".join(fresh))
        for part, names in (left_out or {}).items():
            if part in states and part not in ignored:
                what = f"{part} ({len(names)}: {shortened(names)})"
                logger.warning("%s was saved without some of %s: they stay as they are.", source, what)

    def resume(self, store: CheckpointStore, *, ignore: Iterable[str] = (), strict: bool = False) -> Path | None:
        """Load the newest valid checkpoint of a store, the same on all ranks; a collective.

        Args:
            ignore: names of parts that are left out.
            strict: refuse one that would not go on bit for bit.

        Returns:
            Its path; None: there is none.

        Raises:
            CheckpointError, NotExact, StateMismatch, ValueError: one line.
        """
        rank = agreement.rank()
        newest = agreement.agreed(lambda: store.latest().checkpoint if rank == 0 else None)[0]
        if newest is None:
            return None
        path, outcome = newest.path, list[Loaded]()
        agreement.agreed(lambda: outcome.append(store.load(path, rank)))
        (loaded,) = outcome
        manifest = loaded.manifest
        # a rank that did not exist then takes what rank 0 had
        local = loaded.local or {name: part for name, part in store.load(path, 0).local.items() if name != "rng"}
        reasons = inexact_reasons(manifest.environment, environment_values(agreement.world_size()))
        if strict:
            require_exact(path.name, [*manifest.reproducibility, *reasons])
        if reasons:
            logger.warning("%s may go on with other bits: %s.", path.name, "; ".join(reasons))
        self.load({**loaded.shared, **local}, source=str(path), ignore=ignore, left_out=manifest.left_out)
        return path

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
            return prepare(
                plan, found.parts, self.objects, source=str(chosen), left_out=found.left_out, kinds=found.kinds
            )

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
        if isinstance(obj, MetricState):
            self._kept.append((obj, state))

    def keep_metrics(self) -> None:
        """Keep what Ignite's metrics hold now, for a run that goes on in this process."""
        self._kept = [(each, each.state_dict()) for each in self._metrics()]

    def restore_metrics(self, *, last: bool) -> None:
        """Load Ignite's metrics again: they reset themselves when a run or an epoch starts, one that goes on too.

        Args:
            last: nothing resets them any more before they go on.
        """
        for metric, state in self._kept:
            metric.load_state_dict(state)
        if last:
            self._kept = []

    def problems(self) -> list[str]:
        """Why a run resumed from what is captured now would have other states, for the exactness report."""
        found = [f"{name} is attached but not saved" for name in self.unsaved]
        for name, obj in self.objects.items():
            if isinstance(obj, MetricState) and (why := obj.unsupported_reason()) is not None:
                found.append(f"{name} is not saved, as {why}, which is no plain data")
        return found

    def _metrics(self) -> list[MetricState]:
        return [each for each in self.objects.values() if isinstance(each, MetricState)]

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
                f"{leave_out(*sorted(self.waiting))}."
            )
