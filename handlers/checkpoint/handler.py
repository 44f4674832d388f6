"""Save at an event, at the end and on a stop; resume from the newest valid checkpoint."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, get_type_hints

from ignite.engine import Engine, Events
from torch import nn
from torch.optim import Optimizer

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.checkpoint.load import LoadReport
from ignite_engine.checkpoint.manifest import read_manifest
from ignite_engine.checkpoint.retention import BestCheckpoint, CheckpointInfo, of_one_run, ranked
from ignite_engine.checkpoint.save_options import SaveOptions
from ignite_engine.checkpoint.sources import Found, LoadSource, load_sources
from ignite_engine.checkpoint.states import loading
from ignite_engine.checkpoint.states.model_and_optimizer import ModelState, OptimizerState
from ignite_engine.checkpoint.states.tiers import TIERS, tiers_of
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import CheckpointError, StateMismatch, check_type, did_you_mean, is_number, require_exact
from ignite_engine.events import Phase
from ignite_engine.handlers.checkpoint.rates import Rates, set_rates
from ignite_engine.handlers.checkpoint.saver import Saver, Times
from ignite_engine.handlers.followed_metric import FollowedMetric, improves
from ignite_engine.ranks import agreement
from ignite_engine.state import Start
from ignite_engine.update.of_engine import EngineUpdate

logger = logging.getLogger(__name__)


class Checkpoint:
    """Saves everything that is registered with the Trainer, each checkpoint completely or not at all.

    Args:
        directory: of the run's checkpoints, shared by all ranks.
        name: of this handler's state in a checkpoint.
        to_save: for an engine that was not made of an :class:`~ignite_engine.Update`: the trained objects by name, with
            ``state_dict`` and ``load_state_dict``. None: the model and the optimizers to which its process function
            refers.
        options: the fields of :class:`~ignite_engine.checkpoint.save_options.SaveOptions`, and further tiers.
            ``memory=n`` copies the state into shared memory every n iterations, from where a killed run continues while
            the machine lives; ``"auto"``: the smallest n whose copies cost at most 1 % of the time. It needs memory for
            two copies. ``mirror=url``, a directory or a URL of ``fsspec`` without credentials, uploads the kept
            checkpoints during training. A resume takes the newest valid checkpoint of all tiers.

    A failed save fires ``CHECKPOINT_FAILED`` and training continues; at the end of the run it raises. With
    ``background`` the event is fired at the first step boundary after the save has ended, the same one on all ranks.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        to_save: Mapping[str, Any] | None = None,
        name: str = "checkpoint",
        **options: Any,
    ) -> None:
        check_type("directory", directory, bool(directory) and isinstance(directory, str | PathLike), "a path")
        check_type("to_save", to_save, to_save is None or isinstance(to_save, Mapping), "objects by name or None")
        known = dict.fromkeys((*inspect.signature(type(self)).parameters, *TIERS))  # one's own are added later
        if unknown := [key for key in options if key not in known]:
            raise TypeError(f"{type(self).__name__}() has no option {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        tiers = {key: options.pop(key) for key in TIERS.keys() & options.keys()}
        self.name, self.options = name, SaveOptions(**options)
        self._to_save = to_save
        self._lr: Rates | None = None
        self._ignored: tuple[Sequence[str], int] = ((), 0)
        self._saver = Saver(directory, self.options, self._metrics_of)
        self.tiers = self._saver.tiers = tiers_of(tiers, self._saver)
        """The tiers beside the folder, by name of the option."""
        self.asks_tiers = True
        """Whether :meth:`resume` looks in the tiers beside the folder."""
        best = self.options.best
        self._followed = (
            None
            if best is None
            else FollowedMetric(
                best,
                f"{type(self).__name__}(best={best!r})",
                self.options.mode,
                elsewhere=lambda: self.best is not None,
            )
        )
        self.announces_best = True
        """Whether to log the best checkpoint at the end of a run."""
        self._trainer: Trainer | None = None
        self._asked = self._must = False
        """A save was requested since the last step boundary; and it must happen even if no boundary follows."""
        self._named: set[str] = set()
        self._best: float | None = None
        self._measured: tuple[int, dict[str, float]] = (-1, {})
        self._stale: set[str] = set()
        """Metrics of this boundary that were measured before weights were replaced."""

    def attach(self, engine: Engine, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Save at the step boundary after ``event``; always at the end and on a stop."""
        trainer = Trainer.of(engine)
        self._register(trainer)
        folder = self.store.directory
        for other in trainer.registry.objects.values():
            if isinstance(other, Checkpoint) and other is not self and other.store.directory == folder:
                raise ValueError(
                    f"The checkpoint handlers {other.name!r} and {self.name!r} both save in {folder}, where each would "
                    "delete what the other keeps: give each a directory, or attach one to both events (first | second)."
                )
        self._trainer = trainer
        trainer.register(self.name, self)
        trainer.registry.filters.append(self._saver.filter)
        trainer.roll_back_with(self._load_healthy)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._measure)
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self._save_if_due)
        if self._followed is not None:
            trainer.add_event_handler(Events.COMPLETED, self._followed.warn_if_never_written)
        for tier in self.tiers.values():
            tier.attach(trainer)
        trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, self._name_what_came_late)

    def _register(self, trainer: Trainer) -> None:
        """Register the objects to save, under names that do not depend on their wrapping.

        Raises:
            ValueError: no object that the engine trains is known.
        """
        update, to_save = trainer.update, self._to_save or {}
        if isinstance(update, EngineUpdate):
            update.know(to_save)
            to_save = to_save or update.found()
            if not to_save:
                raise ValueError(
                    "Checkpoint knows no model of this engine: name what is saved, such as "
                    "Checkpoint(directory, to_save={'model': model, 'optimizer': optimizer})."
                )
        models = [obj for obj in to_save.values() if isinstance(obj, nn.Module)]
        for name, obj in to_save.items():
            state = obj
            if isinstance(obj, nn.Module):
                state = ModelState(obj)
            elif isinstance(obj, Optimizer) and (owner := _owner_of(obj, models)) is not None:
                state = OptimizerState(obj, owner, part=name)
            trainer.register(name, state, shared=isinstance(obj, nn.Module | Optimizer))

    @property
    def store(self) -> CheckpointStore:
        """The store of the checkpoints on disk."""
        self._saver.settle()
        return self._saver.store

    @property
    def times(self) -> Times:
        """The durations of saves and loads in this process."""
        return self._saver.times

    @property
    def best(self) -> BestCheckpoint | None:
        """The committed checkpoint of this run with the best value, according to the manifests on disk; or None.

        Before a run has started, the best of the last run that saved in the folder.
        """
        metric = self.options.best
        if metric is None:
            return None
        first = next(iter(ranked(self._of_this_run(), metric, self.options.mode)), None)
        return None if first is None else BestCheckpoint.of(first, metric)

    def restore_best(self) -> BestCheckpoint:
        """Load the weights of the best checkpoint into the model; a collective, at a step boundary or after ``run()``.

        The weights are those that were evaluated: the average, if the evaluation used an ``EMA``. Optimizers, counters
        and data stay as they are. A background save is waited for.

        Raises:
            CheckpointError: there is no best checkpoint; the same on all ranks.
            StateMismatch: the model does not fit the saved one.
            RuntimeError: it is not attached to a trainer yet.
        """
        trainer, saver = self._trainer, self._saver
        if trainer is None:
            raise RuntimeError("Checkpoint.restore_best() needs a trainer: call attach(trainer, event) before.")
        if saver.busy:
            saver.finish(trainer)
        best = agreement.on_rank_0(self._valid_best)
        weights = agreement.on_rank_0(lambda: read_manifest(best.path).weights_of(best.metric))
        read = agreement.together(lambda: loading.read_found(trainer.registry, Found.of(best.path)))
        outcome = loading.load_again(trainer.registry, LoadSource(best.path, weights=weights), read)
        if isinstance(outcome, str):
            raise StateMismatch(outcome)
        if agreement.rank() == 0:
            logger.warning("Restored the weights of the best %s.", best)
        return best

    def _valid_best(self) -> BestCheckpoint:
        metric = self.options.best
        if metric is None:
            raise CheckpointError(
                f"{self.name!r} follows no metric, so no checkpoint is the best: give it one, such as "
                "Checkpoint(..., best='val/loss', mode='min')."
            )
        best = self.store.best(metric, self.options.mode, among=self._of_this_run())
        if best is None:
            raise CheckpointError(
                f"{self.store.directory} holds no valid checkpoint of this run with {metric}, so none is the best."
            )
        return BestCheckpoint.of(best, metric)

    def _of_this_run(self) -> list[CheckpointInfo]:
        saver, found = self._saver, self.store.checkpoints()
        return (
            [checkpoint for checkpoint in found if checkpoint.manifest.run_id == saver.run_id]
            if saver.has_run
            else of_one_run(found)
        )

    @property
    def error(self) -> CheckpointError | None:
        """Why the last save failed; None if it did not."""
        return self._saver.error

    def __call__(self, trainer: Trainer) -> None:
        """Request a save at the RESUME_POINT of this iteration."""
        self._asked = True

    def save(self) -> Path | None:
        """Save now, outside of a run; within one, at the next step boundary. A collective.

        Returns:
            The checkpoint; None within a run.

        Raises:
            CheckpointError: nothing was saved: another process uses the folder; or, outside of a run, the disk failed,
                the run has failed within an iteration, or was resumed and not run yet. Within a run a failure fires
                ``CHECKPOINT_FAILED`` instead.
            RuntimeError: it is not attached to a trainer yet.
        """
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError("Checkpoint.save() needs a trainer: call attach(trainer, event) before.")
        if trainer.state.status == "running":
            self._asked = self._must = True
            return None
        if trainer.resume_state.is_pending:
            raise CheckpointError(
                f"{trainer.resume_state.source} was resumed, and its place in the data is known when run() is called: "
                "save from then on."
            )
        failed = trainer.state.status == "failed"
        with trainer.progress.before_the_failure(trainer.update) as restartable:
            if not restartable:
                raise CheckpointError("The run has failed within an iteration: its weights are those of no iteration.")
            self._save_now(trainer, reasons=[_AFTER_EXCEPTION] if failed else [])
        if self._saver.error is not None:
            raise self._saver.error
        return trainer.state.checkpoint_path

    def _save_now(self, trainer: Trainer, reasons: Iterable[str] = ()) -> None:
        """Save in the foreground."""
        if self._saver.busy:
            self._saver.finish(trainer)
        with self._saver.holding(trainer):
            self._saver.save(trainer, metrics=self._metrics_of(trainer), reasons=reasons)

    def _metrics_of(self, trainer: Trainer) -> dict[str, float] | None:
        measured_at, values = self._measured
        return values if measured_at == trainer.state.iteration else None

    def resume(self, ignore: Iterable[str] = (), *, lr: Rates | None = None) -> Path | None:
        """Load the newest valid checkpoint into everything registered now or before the run starts; a collective.

        Args:
            ignore: names of parts that are not loaded: they start fresh, or no longer exist.
            lr: a new base for the engine's schedules, or a new rate for an optimizer without one: for all parameter
                groups, or by name of an optimizer or a group.

        Returns:
            The checkpoint, the same on all ranks; for a newer copy in memory, the file that refers to it. None if there
            is none: the run starts fresh.

        Raises:
            CheckpointError: a rank cannot read it; raised on all ranks.
            NotExact: with ``strict``, it is not exact or was saved in another environment: number of ranks or threads,
                torch, devices.
            StateMismatch: the state or ``lr`` does not fit the objects here.
            RuntimeError: it is not attached to a trainer yet.
        """
        if self._trainer is None:
            raise RuntimeError("Checkpoint.resume() needs a trainer: call attach(trainer, event) before.")
        if isinstance(ignore, str):
            raise ValueError(f"ignore is a list, got {ignore!r}: write [{ignore!r}].")
        began = time.perf_counter()
        tiers = self.tiers.values() if self.asks_tiers else ()
        fetched = loading.resume(self._trainer.registry, self.store, tiers, ignore=ignore, strict=self.options.strict)
        if fetched is None:
            return None
        found = fetched.info
        if fetched.is_committed:  # again, as the previous process may have been killed before that
            for tier in self.tiers.values():
                tier.push(found.path)
        self._ignored = list(ignore), found.manifest.sequence
        self._saver.resumed(self._trainer, found, on_disk=fetched.is_committed)
        took = self.times.loaded(found.manifest, time.perf_counter() - began)
        self._measured = (found.iteration, found.manifest.metrics)  # the metrics of this boundary, if it is saved again
        # a script without a logging configuration shows warnings only
        level, iteration = logging.WARNING if agreement.rank() == 0 else logging.INFO, self._trainer.state.iteration
        disk = ""
        if not fetched.is_committed:
            on_disk = agreement.on_rank_0(lambda: [saved.iteration for saved in self._of_this_run()])
            disk = f" (disk has {on_disk[-1] if on_disk else 'none'})"
            if self._best is not None and self.options.background:
                self._best = agreement.on_rank_0(
                    lambda: best.value if (best := self.best) else None
                )  # a save that was under way has left nothing
        place = fetched.place
        logger.log(level, "Resumed from %s at iteration %d%s: %s.", place, iteration, disk, took)
        self._lr = lr
        self._set_rates(self._trainer)
        return found.path

    def _set_rates(self, trainer: Trainer) -> None:
        if self._lr is not None:
            set_rates(trainer.registry, self._lr)

    def _load_healthy(self) -> Path | None:
        """Roll back to the newest checkpoint with finite weights, within a run; a collective."""
        trainer, saver = self._trainer, self._saver
        assert trainer is not None
        if saver.busy:
            saver.finish(trainer)
        # parts ignored by the resume are in the checkpoints saved since
        names, newest = self._ignored
        found = loading.resume(trainer.registry, self.store, ignore=names, ignored_up_to=newest, healthy_only=True)
        if found is None:
            return None
        saver.resumed(trainer, found.info)
        self._set_rates(trainer)
        return found.info.path

    def load(self, path: str | Path | Sequence[LoadSource], **options: Any) -> LoadReport:
        """Begin from other sources, if :meth:`resume` found no checkpoint; a collective.

        Load what ``exclude`` leaves out of this run's checkpoints each time, before :meth:`resume`.

        Args:
            path: a checkpoint, a folder of checkpoints or of a run (its newest valid one), or a file of weights
                (safetensors, or a state_dict of ``torch.save``). Or a list of
                :class:`~ignite_engine.checkpoint.LoadSource`, each with its options; if several contain a name, the
                last one wins.
            options: beside a path: ``parts``, ``rename``, ``ignore``, ``strict`` and the others of ``LoadSource``; by
                default the model is loaded.

        Returns:
            What was loaded, missing and unexpected; it is logged, too.

        Raises:
            CheckpointError: there is none, or it cannot be read; the same on all ranks.
            StateMismatch: a strict source does not fit what was built.
            ValueError: a pattern matches nothing.
            RuntimeError: it is not attached to a trainer yet.
        """
        if self._trainer is None:
            raise RuntimeError("Checkpoint.load() needs a trainer: call attach(trainer, event) before.")
        sources = load_sources(path, options)
        if dynamic := next((source for source in sources if source.dynamic), None):
            raise ValueError(f"{dynamic.path} is dynamic: give the list to a ModelBank, which loads it again.")
        report, _ = loading.begin_from(self._trainer.registry, sources)
        self._saver.parent = report.source
        return report

    def state_dict(self) -> dict[str, Any]:
        """The best value so far; the checkpoints themselves are read from disk."""
        followed = self._followed
        if followed is None:
            return {}
        return {
            "key": followed.key,
            "mode": self.options.mode,
            "best": self._best,
            "measured_at": followed.seen_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        followed, mode = self._followed, self.options.mode
        if followed is None or "key" not in state:
            return
        if (state["key"], state["mode"]) != (followed.key, mode):
            logger.warning(
                "%s kept the best by %s (%s) before, now by %s (%s): the next value is the first.",
                *(self.name, state["key"], state["mode"], followed.key, mode),
            )
            return
        self._best, followed.seen_at = state["best"], state["measured_at"]

    def begin_anew(self) -> None:
        """Forget the best value when a new run starts."""
        self._best = None

    def _start(self, trainer: Trainer) -> None:
        if trainer.state.start is Start.RESUMED:
            self._set_rates(trainer)  # also for schedules attached after resume()
        self._asked = self._must = False
        if self.options.on_exception and agreement.world_size() > 1:
            logger.warning("on_exception has no effect on several ranks: the others may be in another iteration.")
        if self._followed is not None:
            self._followed.begin(trainer)
        self._named = set(trainer.registry.resumed_otherwise)  # which were logged
        mine = trainer.reproducibility(self._saver.filter)
        self._name(list(dict.fromkeys(reason for rank in agreement.gather_objects(mine) for reason in rank)))
        self._saver.start(trainer)
        trainer.call_at_end(self._end)
        for tier in self.tiers.values():
            tier.begin(trainer)

    def _name_what_came_late(self, trainer: Trainer) -> None:
        """Report reasons that have come up since the start; the checkpoint is saved already."""
        saved = self._saver.store.last_saved
        if saved is not None and trainer.state.status not in ("created", "failed"):
            self._name(saved.reproducibility)

    _name_what_came_late.phase = Phase.LAST  # type: ignore[attr-defined]  # where strict ends the run

    def _name(self, reasons: Sequence[str]) -> None:
        if self.options.strict:
            require_exact("This run", reasons)
        reasons = [reason for reason in reasons if reason not in self._named]
        self._named.update(reasons)
        if reasons and agreement.rank() == 0:
            logger.warning("A run that is resumed from these checkpoints may not be bit-exact: %s.", "; ".join(reasons))

    def weights_replaced(self) -> None:
        """Weights were replaced: this boundary is not saved yet, and its metrics belong to other weights."""
        assert self._trainer is not None
        self._saver.forget_boundary()
        self._measured, self._stale = (-1, {}), set(self._trainer.state.metrics.fresh)

    def _measure(self, trainer: Trainer) -> None:
        stale, self._stale = self._stale, set()
        fresh = {key: value for key, value in trainer.state.metrics.fresh.items() if key not in stale}
        values = {key: float(value) for key, value in fresh.items() if is_number(value)}
        score = None if self._followed is None else self._followed.new_value(trainer)
        if self._followed is not None and self._followed.key in stale:
            score = None
        if self._followed is not None and score is not None:
            values[self._followed.key] = score
            if self._saver.busy and self._saver.has_saved(trainer):
                self._saver.finish(trainer)  # the boundary is written now, or was not saved
            saved = self._saver.has_saved(trainer)  # an evaluation that is repeated after a resume, or at COMPLETED
            if improves(score, self._best, self.options.mode):
                self._best, self._asked, self._must = score, self._asked or not saved, self._must or not saved
            if saved:
                self._saver.add_metrics(values)
        (measured_at, before), iteration = self._measured, trainer.state.iteration
        self._measured = (iteration, before | values if measured_at == iteration else values)

    def _save_if_due(self, trainer: Trainer) -> None:
        state, saver = trainer.state, self._saver
        if not (self._asked or state.last or state.stopping or state.save_requested or state.background_done):
            return
        asked = self._asked
        self._asked = self._must = False
        at_end = state.last and (self.options.save_at_end or state.stopping)
        if saver.busy and (state.last or (state.background_done and saver.has_written())):
            saver.finish(trainer)
        if saver.has_saved(trainer):  # a stop during the run's last evaluation was saved before it ended
            due = at_end and saver.has_evaluated_since(trainer)
        else:
            due = asked or at_end or state.save_requested
        if not due:
            return
        if saver.busy:
            saver.finish(trainer)
        background = self.options.background and not state.last
        saver.save(trainer, background=background, metrics=self._metrics_of(trainer))

    def _save_what_came_late(self, trainer: Trainer) -> None:
        """Save what a handler has requested after the last step boundary."""
        if self._must and not self._saver.has_saved(trainer):
            self._save_now(trainer)

    def _end(self, trainer: Trainer) -> None:
        try:
            if trainer.state.status in ("completed", "interrupted"):
                self._save_what_came_late(trainer)
            elif trainer.state.status == "running" and self._saver.busy:  # a roll-back, after which the run goes on
                self._saver.finish(trainer)
            self._saver.end(trainer)
            if trainer.state.status == "failed" and agreement.world_size() == 1 and self.options.on_exception:
                with trainer.progress.before_the_failure(trainer.update) as restartable:
                    if restartable and not self._saver.has_saved(trainer):
                        self._saver.save(trainer, reasons=[_AFTER_EXCEPTION])
            if self.announces_best and agreement.rank() == 0 and (best := self.best) is not None:
                logger.warning("Best %s.", best)
        finally:
            try:
                for tier in self.tiers.values():
                    tier.end(trainer)
            finally:
                self._saver.release()


def _owner_of(optimizer: Optimizer, models: Iterable[nn.Module]) -> nn.Module | None:
    """The model with all parameters of an optimizer."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return next((model for model in models if held <= {id(parameter) for parameter in model.parameters()}), None)


def _signature() -> inspect.Signature:
    """The signature of :class:`Checkpoint` with all options."""
    own = [each for each in inspect.signature(Checkpoint).parameters.values() if each.kind is not each.VAR_KEYWORD]
    kinds = get_type_hints(SaveOptions)
    options = [(field.name, field.default, kinds[field.name]) for field in fields(SaveOptions)]
    options += [(name, None, Any) for name in TIERS]
    return inspect.Signature(
        own
        + [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, default, kind in options
        ]
    )


Checkpoint.__signature__ = _signature()  # type: ignore[attr-defined]  # what inspect and help() show

_AFTER_EXCEPTION = "saved after an exception, random numbers as it left them"
