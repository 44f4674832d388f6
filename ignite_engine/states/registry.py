"""What a checkpoint holds: every object with a state, by its stable name."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ignite.metrics import Metric
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_engine import rng
from ignite_engine.checkpointing import (
    CheckpointInfo,
    CheckpointStore,
    Loaded,
    LoadPlan,
    LoadSource,
    LoadTable,
    SaveFilter,
    Source,
    require_exact,
)
from ignite_engine.checkpointing.environment import environment_values, inexact_reasons
from ignite_engine.checkpointing.load.part_names import filled
from ignite_engine.checkpointing.load.prepare import Wanted, prepare_all
from ignite_engine.checkpointing.load.sources import Found
from ignite_engine.checkpointing.nested import walk
from ignite_engine.checkpointing.shards import fitted, has_sharded, layout_of
from ignite_engine.errors import CheckpointError, StateMismatch, leave_out, shortened
from ignite_engine.ranks import agreement
from ignite_engine.states.metrics import MetricState
from ignite_engine.states.model_and_optimizer import (
    ModelState,
    OptimizerState,
    ParametersState,
    reshard,
    unwrap,
)
from ignite_engine.states.resume_state import ResumeState
from ignite_engine.states.trained import TrainedApart

logger = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved: its state is made of tensors, numbers, strings, lists, tuples and dicts."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Registry:
    """Names and their objects.

    Args:
        resume: takes what a checkpoint brings for objects that are not registered yet.
    """

    def __init__(self, resume: ResumeState) -> None:
        self.objects: dict[str, Stateful] = {}
        self.trained_apart = TrainedApart(self.objects)
        self.shared: set[str] = set()
        self.kinds: dict[str, str] = {}
        """What each object is: ``model``, ``optimizer``, ``schedule``, ``average``, ``metric``, ... or ``other``."""
        self.nameless: list[str] = []
        """Attached objects with a state that could not be given a name of their own: they are not saved."""
        self.filters: list[SaveFilter] = []
        """What the attached checkpoint handlers leave out."""
        self.resumed_otherwise: list[str] = []
        """How this run's ranks, sharding or machine differ from those of the checkpoint that it was resumed from."""
        self.times_replaced = 0
        """How often what is registered was loaded again within the run."""
        self._automatic: set[str] = set()
        self._resume = resume

    def register(self, name: str, obj: Any, *, shared: bool = False, kind: str | None = None) -> None:
        """Save ``obj`` in every checkpoint under ``name``; load it at once if a loaded checkpoint has it.

        An object has one name: one that was registered automatically, when it was attached, gets this one instead.

        Args:
            shared: its state is the same on every rank, so one copy is saved.
            kind: what it is, for whoever reads the checkpoint; None: as its type says, else ``other``.

        Raises:
            TypeError: it has no ``state_dict`` and ``load_state_dict``.
            ValueError: another object has this name, or this object was registered under another name.
        """
        if not isinstance(obj, Stateful):
            raise TypeError(
                f"register({name!r}) needs an object with state_dict and load_state_dict, got {type(obj).__name__}."
            )
        if isinstance(obj, Metric):
            obj = next((each for each in self._metrics() if each.metric is obj), None) or MetricState(obj)
        if self.objects.get(name, obj) is not obj:
            taken = self.type_name(name, self.objects[name])
            raise ValueError(f"The name {name!r} is taken by a {taken}: give this one its own name.")
        for other in [each for each, known in self.objects.items() if known is obj and each != name]:
            if other not in self._automatic:
                raise ValueError(f"This {self.type_name(other, obj)} is registered as {other!r} already, got {name!r}.")
            self._forget(other)
        self.objects[name] = obj
        self.kinds[name] = kind or next((each for base, each in _KINDS.items() if isinstance(obj, base)), "other")
        if shared:
            self.shared.add(name)
        if name in self._resume.unclaimed:
            self.load_part(name, self._resume.unclaimed.pop(name), self._resume.left_out)

    def register_attached(self, obj: Any, args: tuple[Any, ...]) -> None:
        """Register an object that was attached without ``register``, under its ``name`` or that of its class.

        A metric goes by the name that it is attached under. A class of the script itself has no package in its name,
        however the script was started. An object whose name is taken is not saved, and is named in the reproducibility
        report, unless it has a ``name`` of its own: then two have the same, which is an error.
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
        package = type(obj).__module__.split(".")[0]
        label = "/".join([*([] if package in _SCRIPT else [package]), type(obj).__name__, *words])
        if label in self.objects:
            self.nameless.append(label)
            return
        for older in (f"{script}/{label}" for script in _SCRIPT):
            if older in self._resume.unclaimed:
                self._resume.unclaimed[label] = self._resume.unclaimed.pop(older)
        self.register(label, obj)
        self._automatic.add(label)

    def holds(self, obj: object) -> bool:
        """Whether ``obj`` is registered, by itself or as the metric that it is."""
        return any(each is obj for each in (*self.objects.values(), *(each.metric for each in self._metrics())))

    def type_name(self, name: str, obj: Any) -> str:
        """What a person calls the type of the object."""
        wrapped = {ModelState: "model", OptimizerState: "optimizer", MetricState: "metric"}.get(type(obj), "")
        own = {"trainer": "counters", "data": "data", "rng": "rng"}
        return own.get(name) or type(getattr(obj, wrapped, obj)).__name__

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
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        """Load every state whose object is registered; the others wait for theirs.

        Args:
            ignore: parts that are not loaded, by name or kind.
            kinds: what the parts are, for those that nothing is registered for.
            left_out: names that were left out when it was saved, by part; they stay as they were built.
        """
        kind_of, ignored = {**(kinds or {}), **self.kinds}, set(ignore)
        for kind in ignored - set(states):
            if parts := {part for part in states if kind_of.get(part) == kind}:
                ignored = ignored - {kind} | parts
        unknown = ignored - set(states)
        if unknown:  # no error: the same program resumes from its own checkpoints, which don't hold them any more
            held = ", ".join(sorted(states))
            logger.warning("%s holds no %s to leave out; it holds %s.", source, ", ".join(sorted(unknown)), held)
        for obj in self.objects.values():
            if isinstance(obj, OptimizerState):
                obj.rate_is_scheduled_anew = any(kind_of.get(part) == "schedule" for part in ignored)
        self._take({name: state for name, state in states.items() if name not in ignored}, source, left_out)
        fresh = sorted(set(self.objects) - set(states))
        if fresh:
            logger.warning("%s holds no state of %s: they start fresh.", source, ", ".join(fresh))
        for part, names in (left_out or {}).items():
            if part in states and part not in ignored:
                what = f"{part} ({len(names)}: {shortened(names)})"
                logger.warning("%s was saved without some of %s: they stay as they are.", source, what)

    def resume(
        self, store: CheckpointStore, *, ignore: Iterable[str] = (), strict: bool = False, healthy_only: bool = False
    ) -> Path | None:
        """Load the newest valid checkpoint of a store, the same on all ranks; a collective.

        Args:
            ignore: names of parts that are left out.
            healthy_only: skip those whose weights are not finite.
            strict: refuse one that would not go on bit for bit.

        Returns:
            Its path; None: there is no checkpoint.

        Raises:
            CheckpointError: there are some, and none of them is valid.
            CheckpointError, NotExact, StateMismatch, ValueError: one line.
        """
        rank = agreement.rank()
        sharding = self._sharding()
        newest = agreement.on_rank_0(lambda: _newest_valid(store, healthy_only=healthy_only, keep=not sharding))
        if newest is None:
            return None
        path = newest.path
        options = {"mmap": bool(sharding), "whole": False}  # what is not of this rank's shards is not read

        def load() -> Loaded:
            loaded = store.load(path, rank, **options)
            if loaded.local:
                return loaded
            # a rank that did not exist then takes what rank 0 had, but random numbers of its own
            first = dict(store.load(path, 0, **options, shared=False).local)
            if "rng" in first and not self._is_rank_invariant(loaded):
                first["rng"] = rng.derived(first["rng"], rank)
            return replace(loaded, local=first)

        loaded = agreement.together(load)
        manifest, local = loaded.manifest, loaded.local
        now = environment_values(agreement.world_size())
        reasons = inexact_reasons(manifest.environment, now, any_ranks=self._is_rank_invariant(loaded))
        if not self._is_rank_invariant(loaded):
            reasons += _changed_ranks(manifest.world_size, agreement.world_size())
        if manifest.sharding != sharding:
            reasons.append(f"sharding: {_listed(manifest.sharding)} when it was saved, {_listed(sharding)} now")
        if strict:
            require_exact(path.name, [*manifest.reproducibility, *reasons])
        self.resumed_otherwise = [each for each in manifest.reproducibility if each.startswith(_RESUMED)]
        if reasons:
            self.resumed_otherwise.append(f"{_RESUMED}{path.name} otherwise than saved ({'; '.join(reasons)})")
        if reasons and rank == 0:
            logger.warning("%s may go on with other bits: %s.", path.name, "; ".join(reasons))
        states = {**loaded.shared, **local}
        # pieces are read now, from files that one rank may not be able to read
        agreement.agreed(
            lambda: self.load(states, source=str(path), ignore=ignore, left_out=manifest.left_out, kinds=manifest.kinds)
        )
        return path

    def begin_from(self, sources: Sequence[LoadSource]) -> tuple[LoadTable, list[Found | None]]:
        """Load what plans take from checkpoints that are not this run's; a collective.

        Args:
            sources: rank 0 chooses of each which checkpoint is loaded on all ranks. The last that has a name brings it.

        Returns:
            What was loaded, and from where; None for a source that is optional and was not there.

        Raises:
            CheckpointError, StateMismatch, ValueError: one line, on all ranks the same; nothing was loaded.
        """
        chosen = agreement.on_rank_0(lambda: [each.find() for each in sources])
        states, table = agreement.together(lambda: self._prepared(sources, chosen))
        agreement.agreed(lambda: self._take(states, table.source))
        logger.log(logging.INFO if table.complete else logging.WARNING, "%s", table)
        return table, chosen

    def read(self, found: Found) -> Source:
        """What this rank needs of it, sharded tensors without their values."""
        return found.read(agreement.rank(), mmap=bool(self._sharding()))

    def load_again(
        self,
        plan: LoadPlan,
        read: Source,
        held: Mapping[str, Container[str] | None],
        elsewhere: Mapping[str, Iterable[str]],
        *,
        reset_optimizers: bool = False,
    ) -> LoadTable | str:
        """Load what a plan takes from a source at a step boundary within a run; a collective.

        Args:
            read: of the same source on all ranks.
            held: what stays as it is, whatever the plan says: names by part, or None for a whole part.
            elsewhere: what a strict plan may lack, as it came from another source.
            reset_optimizers: optimizers forget what they know of the model's tensors that are loaded, unless it is
                loaded, too.

        Returns:
            What was loaded; or, on all ranks the same, why nothing was.
        """

        def prepared() -> tuple[dict[str, Any], LoadTable] | str:
            try:
                states, table = prepare_all([self._wanted(plan, read)], self.objects, held=held, elsewhere=elsewhere)
                # pieces of sharded tensors are read now, while nothing has changed
                return {name: self._fitted(name, states[name]) for name in states if name in self.objects}, table
            except (CheckpointError, ValueError) as error:
                return str(error)

        outcome = agreement.together(prepared)
        refusals = agreement.gather_objects(outcome if isinstance(outcome, str) else None)
        if reason := next(filter(None, refusals), None):
            return reason
        assert not isinstance(outcome, str)
        states, table = outcome
        agreement.agreed(lambda: self._replace(states, table, reset_optimizers))
        self.times_replaced += 1
        return table

    def _replace(self, states: Mapping[str, Any], table: LoadTable, reset_optimizers: bool) -> None:
        for name, state in states.items():
            self.objects[name].load_state_dict(state)
        if not reset_optimizers or "model" not in states:
            return
        for name, obj in self.objects.items():
            if isinstance(obj, OptimizerState):
                kept = table[name].loaded if name in states else []
                obj.reset(set(table["model"].loaded) - set(kept))

    def _prepared(
        self, sources: Sequence[LoadSource], chosen: Sequence[Found | None]
    ) -> tuple[dict[str, Any], LoadTable]:
        nothing = LoadPlan(parts=[], strict=False)
        wanted = [
            self._wanted(source.plan, self.read(found))
            if found is not None
            else Wanted(nothing, f"{source.path} (optional, not there)", {})
            for source, found in zip(sources, chosen, strict=True)
        ]
        return prepare_all(wanted, self.objects)

    def _wanted(self, plan: LoadPlan, read: Source) -> Wanted:
        return Wanted(plan, str(read.path), read.parts, read.left_out, {**self.kinds, **read.kinds})

    def load_part(self, name: str, state: Any, left_out: Mapping[str, Sequence[str]]) -> None:
        """Load one registered object; names that were left out when its state was saved stay as they are."""
        obj = self.objects[name]
        if names := left_out.get(name):
            state = filled(state, obj.state_dict(), names)
        if not isinstance(obj, ModelState | OptimizerState):  # which do it themselves
            state = self._fitted(name, state)
        obj.load_state_dict(state)
        self._resume.loaded.add(name)
        if isinstance(obj, MetricState):
            self._resume.metrics.append((obj, state))

    def evaluated_with(self) -> dict[str, str]:
        """The part of the average that takes the place of the weights, by the name of the evaluation; else none."""
        sets = [name.removeprefix("evaluation/") for name in self.objects if name.startswith("evaluation/")]
        averages = {name: obj for name, obj in self.objects.items() if hasattr(obj, "is_evaluated")}
        return {each: name for name, average in averages.items() for each in sets if average.is_evaluated(each)}

    def check_all_claimed(self) -> None:
        """Refuse to continue while a loaded part has no object.

        Raises:
            StateMismatch: names both sides and the remedy.
        """
        if unclaimed := sorted(self._resume.unclaimed):
            raise StateMismatch(
                f"{self._resume.source} holds {unclaimed}, for which nothing is registered "
                f"(registered: {sorted(self.objects)}): attach what is missing, or leave it out with "
                f"{leave_out(*unclaimed)}."
            )

    def keep_metrics(self) -> None:
        """Keep what Ignite's metrics hold now, for a run that continues in this process."""
        self._resume.metrics = [(each, each.state_dict()) for each in self._metrics()]

    def inexact_reasons(self) -> list[str]:
        """Why a run resumed from what is captured now would have other states, for the reproducibility report."""
        found = [*self.resumed_otherwise, *(f"{name} is attached but not saved" for name in self.nameless)]
        found += self.trained_apart.reasons()
        if self.filters and not self._holds_parameters():
            found.append("no parameters are saved, as no model is registered (trainer.register(name, model) saves one)")
        for name, obj in self.objects.items():
            if isinstance(obj, MetricState) and (why := obj.unsupported_reason()) is not None:
                found.append(f"{name} is not saved, as {why}, which is not plain data")
            if isinstance(why := getattr(obj, "outside_of_run", None), str):
                found.append(f"{name} {why}")
            if isinstance(obj, OptimizerState) and (unsaved := obj.unsaved()):
                found.append(f"{name} trains {shortened(unsaved)}, not the model's, without saving their values")
        return found

    def _is_rank_invariant(self, loaded: Loaded) -> bool:
        """Whether the bits of the run, random numbers included, do not depend on the number of ranks."""
        return "rank_invariant" in self.objects and "rank_invariant" in loaded.shared

    def _holds_parameters(self) -> bool:
        if any(kind in _WITH_PARAMETERS for kind in self.kinds.values()):
            return True
        own = (obj for name, obj in self.objects.items() if name not in ("trainer", "data", "rng"))
        return any(isinstance(leaf, Tensor) for obj in own for _, leaf in walk(obj.state_dict()))

    def _metrics(self) -> list[MetricState]:
        return [each for each in self.objects.values() if isinstance(each, MetricState)]

    def _fitted(self, name: str, state: Any) -> Any:
        """A copy of a state with its tensors sharded as the object has them; where nothing is sharded, itself."""
        if isinstance(self.objects[name], OptimizerState):
            return state
        saved_sharded = has_sharded(state)
        if not (saved_sharded or self._sharding()):
            return state
        return fitted(state, self.objects[name].state_dict() if saved_sharded or name in self.shared else None)

    def _sharding(self) -> list[str]:
        """How the models of this run are sharded; empty: they are not."""
        models = [unwrap(each.model) for each in self.objects.values() if isinstance(each, ModelState)]
        for model in models:
            reshard(model)
        return list(layout_of(parameter for model in models for parameter in model.parameters()))

    def _forget(self, name: str) -> None:
        del self.objects[name], self.kinds[name]
        self._automatic.discard(name)

    def _take(
        self, states: Mapping[str, Any], source: str, left_out: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        resume = self._resume
        resume.source, resume.unclaimed, resume.left_out = source, dict(states), left_out or {}
        for name in [name for name in resume.unclaimed if name in self.objects]:
            self.load_part(name, resume.unclaimed.pop(name), resume.left_out)


def _listed(sharding: Sequence[str]) -> str:
    return ", ".join(sharding) or "none"


def _newest_valid(store: CheckpointStore, *, healthy_only: bool, keep: bool) -> CheckpointInfo | None:
    """The newest valid checkpoint, None if there is none at all.

    Raises:
        CheckpointError: none of those that are there is valid: to start over would lose them, one save after the other.
    """
    newest, skipped = store.latest(healthy_only=healthy_only, keep=keep)
    if newest is None and skipped and not healthy_only:
        path, reason = skipped[0][0], skipped[0][1].rstrip(".")
        raise CheckpointError(
            f"None of the {len(skipped)} checkpoints in {store.directory} is valid ({path.name}: {reason}): "
            "bring one back, or move the folder away to start over."
        )
    return newest


def _changed_ranks(before: int, now: int) -> list[str]:
    """What becomes of states that are each rank's own."""
    if before == now:
        return []
    which = ", ".join(map(str, range(min(before, now), max(before, now))))
    if before > now:
        return [f"what ranks {which} kept of their own, such as random numbers, is dropped"]
    return [f"ranks {which} have random numbers drawn from the checkpoint's and their rank, and rank 0's other states"]


_RESUMED = "resumed from "
_SCRIPT = ("__main__", "__mp_main__")
"""Modules of the script that was started, in this process and in one that it spawned."""
_KINDS: dict[type, str] = {
    ModelState: "model",
    nn.Module: "model",
    OptimizerState: "optimizer",
    Optimizer: "optimizer",
    MetricState: "metric",
    ParametersState: "parameters",
}
_WITH_PARAMETERS = ("model", "parameters")
