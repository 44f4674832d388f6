"""The registered objects, whose states a checkpoint holds, by name."""

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
"""Converts the saved state of a part, given by name, to the state that the registered object loads."""


def unchanged(part: str, state: Any) -> Any:
    """Return the state as it was saved."""
    return state


class ResumeState:
    """The loaded state between ``checkpoint.resume()`` and the first batch. The run uses it in this order:

    1. ``run()``: counters were loaded, so the run is *resumed*; :attr:`data` positions the loader.
    2. STARTED: handlers may still register objects, which claim their parts from :attr:`unclaimed`.
    3. After STARTED an unclaimed part is an error. Metrics, which reset themselves at STARTED, are loaded again.
    4. Random numbers are restored. EPOCH_STARTED is fired for an epoch that has not begun.
    5. Before the first batch everything is dropped (:meth:`clear`).

    A run that fails before step 5, such as for an unclaimed part, leaves it here: the next ``run()`` resumes.
    """

    def __init__(self) -> None:
        self.source: str | None = None
        """The origin of the parts, for messages."""
        self.unclaimed: dict[str, Any] = {}
        """Parts that no registered object has claimed yet, by name."""
        self.adapt: Adapt = unchanged
        """Applied to a part when an object claims it."""
        self.saved_grouping: Any = None
        """The ``Grouping`` of an iteration in the saved run; None: no counters were loaded."""
        self.data: dict[str, Any] | None = None
        """The position in the data."""
        self.in_eval_mode: list[str] = []
        """Names of modules that were in evaluation mode."""
        self.rng: dict[str, Any] | None = None
        """States of the random number generators."""
        self.metrics: list[tuple[MetricState, Any]] = []
        """The Ignite metrics that are attached to the Trainer, with their states."""
        self.loaded: set[str] = set()
        """Names of objects whose state was loaded since the last run."""

    @property
    def is_pending(self) -> bool:
        """Whether counters were loaded and no run has begun with them yet."""
        return self.saved_grouping is not None

    def restore_metrics(self) -> None:
        """Load the metrics again, after they have reset themselves because a run starts."""
        for metric, state in self.metrics:
            metric.load_state_dict(state)

    def clear(self) -> None:
        """Drop everything; the first batch is about to be fetched."""
        self.saved_grouping, self.data, self.rng, self.metrics, self.in_eval_mode = None, None, None, [], []
        self.loaded.clear()


logger = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved: its state is made of tensors, numbers, strings, lists, tuples and dicts."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Registry:
    """The registered objects by name.

    Args:
        resume: holds the loaded states of objects that are not registered yet.
    """

    def __init__(self, resume: ResumeState) -> None:
        self.objects: dict[str, Stateful] = {}
        self.shared: set[str] = set()
        self.kinds: dict[str, str] = {}
        """The kind of each object: ``model``, ``optimizer``, ``schedule``, ``average``, ``metric``, ..., ``other``."""
        self.of_update: list[str] = []
        """Names of the objects on which the bits of the update depend."""
        self.nameless: list[str] = []
        """Attached objects that have a state but no unique name; they are not saved."""
        self.filters: list[SaveFilter] = []
        """The filters of the attached checkpoint handlers."""
        self.resumed_otherwise: list[str] = []
        """Reasons why this run continued with other bits when it was resumed."""
        self._automatic: set[str] = set()
        self._rank_digests: RankDigests | None = None
        self._resume = resume

    @property
    def rank_digests(self) -> RankDigests | None:
        """Compares the weights of the ranks; None on one process."""
        if self._rank_digests is None and agreement.world_size() > 1:
            from ignite_engine.checkpoint.states.rank_digests import RankDigests

            self._rank_digests = RankDigests(self.objects, self.shared)
        return self._rank_digests

    def register(self, name: str, obj: Any, *, shared: bool = False, kind: str | None = None) -> None:
        """Save ``obj`` in every checkpoint under ``name``; load it at once if a loaded checkpoint has it.

        An object has one name: one that was registered automatically, when it was attached, gets this one instead.

        Args:
            shared: its state is the same on every rank, so one copy is saved.
            kind: of the object, stored in the checkpoint; None: inferred from its type, else ``other``.

        Raises:
            TypeError: it lacks ``state_dict`` or ``load_state_dict``.
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
        """Register an object that was attached without ``register``, under its ``name`` or the name of its class.

        A metric is registered under the name given to ``attach``. The name of a class in the script itself has no
        package, however the script was started. If the class name is taken, the object is not saved and the
        reproducibility report names it; if its ``name`` is taken, that is an error.
        """
        words = [str(arg) for arg in args if isinstance(arg, str)]
        if isinstance(obj, Metric) and not words:
            return  # only one of its handlers has the name
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
        """Whether ``obj`` is registered, directly or as a metric."""
        return any(known is obj for known in (*self.objects.values(), *(known.metric for known in self._metrics())))

    def type_name(self, name: str, obj: Any) -> str:
        """The type of an object, as a person would call it."""
        wrapped = {ModelState: "model", OptimizerState: "optimizer", MetricState: "metric"}.get(type(obj), "")
        own = {"trainer": "counters", "data": "data", "rng": "rng"}
        return own.get(name) or type(getattr(obj, wrapped, obj)).__name__

    def capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states of the shared objects, and those of this rank's own objects."""
        shared = {name: obj.state_dict() for name, obj in self.objects.items() if name in self.shared}
        local = {name: obj.state_dict() for name, obj in self.objects.items() if name not in self.shared}
        return shared, local

    def begin_anew(self) -> None:
        """Call ``begin_anew()`` of objects that have it: a new run starts, and they drop the state of an earlier one.

        Objects whose state was loaded since are skipped.
        """
        for name, obj in self.objects.items():
            if name not in self._resume.loaded and hasattr(type(obj), "begin_anew"):
                obj.begin_anew()  # type: ignore[attr-defined]  # its type has it

    def flush_to_disk(self) -> None:
        """Call ``flush_to_disk()`` of objects that have it, such as the log, whose files must match the checkpoint."""
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
        """Load every state whose object is registered; the others wait for their objects.

        Args:
            ignore: names or kinds of parts that are not loaded.
            kinds: of parts that have no registered object.
            adapt: see :class:`ResumeState`.

        Returns:
            The names of the parts that were not ignored.
        """
        kind_of, ignored = {**(kinds or {}), **self.kinds}, set(ignore)
        for kind in ignored - set(states):
            if parts := {part for part in states if kind_of.get(part) == kind}:
                ignored = ignored - {kind} | parts
        unknown = ignored - set(states)
        if unknown:  # not an error: the program's own later checkpoints no longer hold these parts
            held = ", ".join(sorted(states))
            logger.warning("%s holds no %s to leave out; it holds %s.", source, ", ".join(sorted(unknown)), held)
        self.take({name: state for name, state in states.items() if name not in ignored}, source, adapt)
        fresh = sorted(set(self.objects) - set(states))
        if fresh:
            logger.warning("%s holds no state of %s: they start fresh.", source, ", ".join(fresh))
        return set(states) - ignored

    def take(self, states: Mapping[str, Any], source: str, adapt: Adapt = unchanged) -> None:
        """As :meth:`load`, for states that were chosen already."""
        resume = self._resume
        resume.source, resume.unclaimed, resume.adapt = source, dict(states), adapt
        names = [name for name in resume.unclaimed if name in self.objects]
        # schedules last: they set the options of their optimizer
        for name in sorted(names, key=lambda name: self.kinds.get(name) == "schedule"):
            self._claim(name)

    def _claim(self, name: str) -> None:
        """Load the waiting state of a registered object."""
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
        """By name of an evaluation, the average that replaces the weights in it."""
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
            StateMismatch: names the parts, the registered objects and the remedy.
        """
        if unclaimed := sorted(self._resume.unclaimed):
            raise StateMismatch(
                f"{self._resume.source} holds {unclaimed}, for which nothing is registered "
                f"(registered: {sorted(self.objects)}): attach what is missing, or leave it out with "
                f"{leave_out(*unclaimed)}."
            )

    def keep_metrics(self) -> None:
        """Keep the current states of Ignite's metrics for a run that continues in this process."""
        self._resume.metrics = [(metric, metric.state_dict()) for metric in self._metrics()]

    def _metrics(self) -> list[MetricState]:
        return [obj for obj in self.objects.values() if isinstance(obj, MetricState)]


_SCRIPT = ("__main__", "__mp_main__")
"""Names of the script's module, in the main process and in spawned ones."""
_KINDS: dict[type, str] = {
    ModelState: "model",
    nn.Module: "model",
    OptimizerState: "optimizer",
    Optimizer: "optimizer",
    MetricState: "metric",
    EvaluatedWeights: "average",
    ParametersState: "parameters",
}
