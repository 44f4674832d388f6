"""What a checkpoint holds: every object with a state, by its stable name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ignite.metrics import Metric
from torch import nn
from torch.optim import Optimizer

from ignite_engine.checkpoint.states.metrics import MetricState
from ignite_engine.checkpoint.states.model_and_optimizer import (
    EvaluatedWeights,
    ModelState,
    OptimizerState,
    ParametersState,
    restore_types,
)
from ignite_engine.errors import StateMismatch, leave_out
from ignite_engine.ranks import agreement

if TYPE_CHECKING:
    from ignite_engine.checkpoint.part_names import SaveFilter
    from ignite_engine.checkpoint.states.rank_digests import RankDigests

Adapt = Callable[[str, Any], Any]
"""Makes of the saved state of a part, by the part's name, the state that its registered object loads."""


def unchanged(part: str, state: Any) -> Any:
    """The state as it was saved."""
    return state


class ResumeState:
    """Waits here between ``checkpoint.resume()`` and the first batch. The run takes it in this order:

    1. ``run()``: the counters are there, so the run is *resumed*; :attr:`data` positions the loader.
    2. STARTED: handlers may still register objects, which claim their parts from :attr:`unclaimed`.
    3. After STARTED whatever is unclaimed is an error. Metrics, which reset themselves at STARTED, are loaded again.
    4. Random numbers are restored. EPOCH_STARTED comes for an epoch that has not begun.
    5. Before the first batch all of it is dropped (:meth:`clear`).

    A run that fails before 5, because a part is unclaimed, say, leaves it here: the next ``run()`` resumes.
    """

    def __init__(self) -> None:
        self.source: str | None = None
        """Where the parts are from, for messages."""
        self.unclaimed: dict[str, Any] = {}
        """Parts that no registered object has claimed, by name."""
        self.adapt: Adapt = unchanged
        """Applied to a part when its object claims it."""
        self.saved_grouping: Any = None
        """The ``Grouping`` that an iteration had where the run's counters were saved; None: none were loaded."""
        self.data: dict[str, Any] | None = None
        """The position in the data."""
        self.in_eval_mode: list[str] = []
        """Modules of the model that were in eval mode."""
        self.rng: dict[str, Any] | None = None
        """States of the random number generators."""
        self.metrics: list[tuple[MetricState, Any]] = []
        """Ignite's metrics that are attached to the Trainer, each with its state."""
        self.loaded: set[str] = set()
        """Names of the objects whose state was loaded since the last run."""

    @property
    def is_pending(self) -> bool:
        """The run's counters were loaded, and no run has begun with them yet."""
        return self.saved_grouping is not None

    def restore_metrics(self) -> None:
        """Load the metrics again, after they have reset themselves because a run starts."""
        for metric, state in self.metrics:
            metric.load_state_dict(state)

    def clear(self) -> None:
        """The first batch is about to be fetched: nothing waits any more."""
        self.saved_grouping, self.data, self.rng, self.metrics, self.in_eval_mode = None, None, None, [], []
        self.loaded.clear()


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
        self.shared: set[str] = set()
        self.kinds: dict[str, str] = {}
        """What each object is: ``model``, ``optimizer``, ``schedule``, ``average``, ``metric``, ... or ``other``."""
        self.of_update: list[str] = []
        """Names of what the update's bits depend on."""
        self.nameless: list[str] = []
        """Attached objects with a state that could not be given a name of their own: they are not saved."""
        self.filters: list[SaveFilter] = []
        """What the attached checkpoint handlers leave out."""
        self.resumed_otherwise: list[str] = []
        """How this run's update, ranks, sharding or machine differ from what the checkpoint was saved with."""
        self._automatic: set[str] = set()
        self._rank_digests: RankDigests | None = None
        self._resume = resume

    @property
    def rank_digests(self) -> RankDigests | None:
        """Notices where ranks have different weights; None on one process."""
        if self._rank_digests is None and agreement.world_size() > 1:
            from ignite_engine.checkpoint.states.rank_digests import RankDigests

            self._rank_digests = RankDigests(self.objects, self.shared)
        return self._rank_digests

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
            obj = next((state for state in self._metrics() if state.metric is obj), None) or MetricState(obj)
        if self.objects.get(name, obj) is not obj:
            taken = self.type_name(name, self.objects[name])
            raise ValueError(f"The name {name!r} is taken by a {taken}: give this one its own name.")
        for other in [label for label, known in self.objects.items() if known is obj and label != name]:
            if other not in self._automatic:
                raise ValueError(f"This {self.type_name(other, obj)} is registered as {other!r} already, got {name!r}.")
            del self.objects[other], self.kinds[other]
            self._automatic.discard(other)
        self.objects[name] = obj
        self.kinds[name] = kind or next(
            (kind_of_base for base, kind_of_base in _KINDS.items() if isinstance(obj, base)), "other"
        )
        if shared:
            self.shared.add(name)
        if name in self._resume.unclaimed:
            self._claim(name)

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
        self.register(label, obj)
        self._automatic.add(label)

    def holds(self, obj: object) -> bool:
        """Whether ``obj`` is registered, by itself or as the metric that it is."""
        return any(known is obj for known in (*self.objects.values(), *(known.metric for known in self._metrics())))

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

    def begin_anew(self) -> None:
        """A run starts over: objects with ``begin_anew()`` drop what an earlier run in this process has left in them.

        Not those into which a state was loaded since.
        """
        for name, obj in self.objects.items():
            if name not in self._resume.loaded and hasattr(type(obj), "begin_anew"):
                obj.begin_anew()  # type: ignore[attr-defined]  # its type has it

    def flush_to_disk(self) -> None:
        """Let what writes files of its own, as sinks do, make durable what its state relies on."""
        for obj in self.objects.values():
            if callable(flush := getattr(obj, "flush_to_disk", None)):
                flush()

    def load(
        self,
        states: Mapping[str, Any],
        *,
        source: str,
        ignore: Iterable[str] = (),
        kinds: Mapping[str, str] | None = None,
        adapt: Adapt = unchanged,
    ) -> set[str]:
        """Load every state whose object is registered; the others wait for theirs.

        Args:
            ignore: parts that are not loaded, by name or kind.
            kinds: what the parts are, for those that nothing is registered for.
            adapt: see :class:`ResumeState`.

        Returns:
            The names of the parts that were not ignored.
        """
        kind_of, ignored = {**(kinds or {}), **self.kinds}, set(ignore)
        for kind in ignored - set(states):
            if parts := {part for part in states if kind_of.get(part) == kind}:
                ignored = ignored - {kind} | parts
        unknown = ignored - set(states)
        if unknown:  # no error: the same program resumes from its own checkpoints, which don't hold them any more
            held = ", ".join(sorted(states))
            logger.warning("%s holds no %s to leave out; it holds %s.", source, ", ".join(sorted(unknown)), held)
        self.take({name: state for name, state in states.items() if name not in ignored}, source, adapt)
        fresh = sorted(set(self.objects) - set(states))
        if fresh:
            logger.warning("%s holds no state of %s: they start fresh.", source, ", ".join(fresh))
        return set(states) - ignored

    def take(self, states: Mapping[str, Any], source: str, adapt: Adapt = unchanged) -> None:
        """As :meth:`load`, of parts that were chosen before."""
        resume = self._resume
        resume.source, resume.unclaimed, resume.adapt = source, dict(states), adapt
        names = [name for name in resume.unclaimed if name in self.objects]
        # a schedule sets options of its optimizer, whose own state is that of the last save
        for name in sorted(names, key=lambda name: self.kinds.get(name) == "schedule"):
            self._claim(name)

    def _claim(self, name: str) -> None:
        """Give a registered object its part of what was loaded."""
        resume, obj = self._resume, self.objects[name]
        state = resume.adapt(name, resume.unclaimed.pop(name))
        self.load_into(name, state)
        resume.loaded.add(name)
        if isinstance(obj, MetricState):
            resume.metrics.append((obj, state))

    def load_into(self, name: str, state: Any) -> None:
        """Load a state into the registered object of this name."""
        obj = self.objects[name]
        obj.load_state_dict(state)
        if isinstance(obj, Optimizer):
            restore_types(obj, state)

    def evaluated_with(self) -> dict[str, str]:
        """The part of the average that takes the place of the weights, by the name of the evaluation; else none."""
        sets = [name.removeprefix("evaluation/") for name in self.objects if name.startswith("evaluation/")]
        averages = {name: obj for name, obj in self.objects.items() if hasattr(obj, "is_evaluated")}
        return {
            evaluation: name
            for name, average in averages.items()
            for evaluation in sets
            if average.is_evaluated(evaluation)
        }

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
        self._resume.metrics = [(metric, metric.state_dict()) for metric in self._metrics()]

    def _metrics(self) -> list[MetricState]:
        return [obj for obj in self.objects.values() if isinstance(obj, MetricState)]


_SCRIPT = ("__main__", "__mp_main__")
"""Modules of the script that was started, in this process and in one that it spawned."""
_KINDS: dict[type, str] = {
    ModelState: "model",
    nn.Module: "model",
    OptimizerState: "optimizer",
    Optimizer: "optimizer",
    MetricState: "metric",
    EvaluatedWeights: "average",
    ParametersState: "parameters",
}
