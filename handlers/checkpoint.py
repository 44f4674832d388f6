"""Save at an event, at the end and on a stop; resume from the newest valid checkpoint."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ignite.engine import Events
from ignite.engine.events import RemovableEventHandle
from torch import Tensor

from ignite_engine import Phase, Trainer, TrainingEvents, Update, agreement
from ignite_engine.checkpointing import (
    BackgroundSave,
    CheckpointError,
    CheckpointStore,
    LoadPlan,
    LoadTable,
    Retention,
    SaveFilter,
    Snapshot,
    all_finite,
    require_exact,
)
from ignite_engine.named_states import ModelState, OptimizerState, unwrap

logger = logging.getLogger(__name__)

_PEERS_TIMEOUT_S = 60.0


class Checkpoint:
    """Everything registered with the Trainer, committed whole or not at all.

    Args:
        directory: of all checkpoints of the run, shared by the ranks.
        keep_last: newest ones kept, at least 1.
        best: name of a metric, written on every rank; a new best one, by its mean over the ranks, is saved and kept.
        keep_best: how many of the best are kept.
        mode: whether a small or a large value is good.
        keep_every: those whose iteration is a multiple of it stay for good.
        config: kept in each checkpoint.
        labels: words that each checkpoint is labelled with.
        exclude: what is not saved: parts, such as ``optimizer``, or names inside parts, such as ``model:backbone.*``.
            A resumed run has it as it was built, so it must not be trained; the exactness report names it.
        keep_fn: ``keep_fn(part, name, value)``, asked of each name inside a part; False leaves it out, too.
        background: write while training goes on; the last save of a run is waited for. It holds a second copy of the
            state in host memory. With an ``Update`` weights and optimizer state are copied beside the next forward
            and backward; with an update function of your own training waits for the copy.
        when_busy: what a save that is due does while the one before is still being written; ``wait`` or ``skip``
            (never a best one, one that was asked for, or the last).
        on_exception: save also when the update or a handler raises, if nothing of the iteration was applied yet; on
            one process only.
        strict: refuse to begin, or to resume, what cannot be resumed bit for bit.

    A save that fails fires ``CHECKPOINT_FAILED`` and training goes on; the one at the end of the run raises. In the
    background both events come at the first edge after the save has ended, on all ranks at the same one.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 2,
        best: str | None = None,
        keep_best: int = 1,
        mode: Literal["min", "max"] = "min",
        keep_every: int | None = None,
        config: Mapping[str, Any] | None = None,
        labels: Iterable[str] = (),
        exclude: Iterable[str] = (),
        keep_fn: Callable[[str, str, Any], bool] | None = None,
        background: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
        on_exception: bool = False,
        strict: bool = False,
        name: str = "checkpoint",
    ) -> None:
        if when_busy not in ("wait", "skip"):
            raise ValueError(f"when_busy must be 'wait' or 'skip', got {when_busy!r}.")
        self.background, self.when_busy, self.on_exception = background, when_busy, on_exception
        self.strict = strict
        self.store = CheckpointStore(directory)
        self.retention = Retention(
            keep_last=keep_last, keep_best=keep_best, best=best, mode=mode, keep_every=keep_every
        )
        self.config, self.name, self.labels = config, name, tuple(labels)
        self.filter = SaveFilter(exclude, keep_fn)
        self.error: CheckpointError | None = None
        """Why the last save failed; None: it did not."""
        self._trainer: Trainer | None = None
        self._due = self._must = False
        self._saving: BackgroundSave[Path] | None = None
        self._before_step: RemovableEventHandle | None = None
        self._snapshot = Snapshot()
        self._saved_at: tuple[int, int] | None = None
        self._saving_at = -1
        self._best: float | None = None
        self._measured: tuple[int, dict[str, float]] = (-1, {})
        self._resumed_from: str | None = None

    def attach(self, trainer: Trainer, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Save at the edge after ``event``; always at the end and on a stop."""
        self._trainer = trainer
        trainer.register(self.name, self)
        trainer.registry.filters.append(self.filter)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._measure)
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self._save_if_due)

    def __call__(self, trainer: Trainer) -> None:
        """Mark a save as due; it happens at the RESUME_POINT of this iteration."""
        self._due = True

    def resume(self, ignore: Iterable[str] = ()) -> Path | None:
        """Load the newest valid checkpoint into all that is registered, and what will be; a collective.

        Args:
            ignore: names of parts that are left out.

        Returns:
            The checkpoint, the same on all ranks; None if there is none: the run starts fresh.

        Raises:
            CheckpointError: it is valid but a rank cannot read it; raised on all of them.
            NotExact: with ``strict``, it says that it is not exact, or was saved in another environment: number of
                ranks or threads, torch, devices.
            RuntimeError: it is not attached to a trainer yet.
        """
        if self._trainer is None:
            raise RuntimeError("Checkpoint.resume() needs a trainer: call attach(trainer, event) before.")
        path = self._trainer.registry.resume(self.store, ignore=ignore, strict=self.strict)
        if path is not None:
            self._saved_at, self._resumed_from = _edge_of(self._trainer), path.name
            logger.info("Resumed from %s.", path)
        return path

    def load(self, path: str | Path, plan: LoadPlan) -> LoadTable:
        """Begin with what ``plan`` takes from another run's checkpoint, where :meth:`resume` found none; a collective.

        What ``exclude`` leaves out of this run's own checkpoints is to be loaded before :meth:`resume`, each time.

        Args:
            path: a checkpoint, a folder of checkpoints or of a run (its newest valid one), or a file of weights
                (safetensors, or a state_dict of ``torch.save``).
            plan: such as ``LoadPlan.fine_tune()``.

        Returns:
            What was loaded, skipped and missing, part by part; it is logged, too.

        Raises:
            CheckpointError: there is none, or it cannot be read; the same on all ranks, as the others are.
            StateMismatch: the plan is strict, and what was saved does not fit what was built.
            ValueError: something in the plan matches nothing.
            RuntimeError: it is not attached to a trainer yet.
        """
        if self._trainer is None:
            raise RuntimeError("Checkpoint.load() needs a trainer: call attach(trainer, event) before.")
        table = self._trainer.registry.begin_from(path, plan)
        self._resumed_from = table.source
        return table

    def state_dict(self) -> dict[str, Any]:
        """The best value so far; which checkpoints there are is read from disk."""
        return {"best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = state["best"]

    def _start(self, trainer: Trainer) -> None:
        self._due = self._must = False
        if trainer.state.iteration == 0:
            self._saved_at = None
        if agreement.world_size() > 1:  # a group of its own: a background save exchanges in another thread
            self.store = CheckpointStore(self.store.directory, agreement.cpu_group("checkpoint"))
        self.store.sweep()
        if self._saved_at is not None:  # resumed: the process before may have been killed between a save and its prune
            self._prune()
        self.filter.check(trainer.registry.capture)
        if self.strict:
            reasons = [each for rank in agreement.gather_objects(trainer.exactness(self.filter)) for each in rank]
            require_exact("This run", list(dict.fromkeys(reasons)))
        trainer.call_at_end(self._end)

    def _measure(self, trainer: Trainer) -> None:
        values = {key: float(value) for key, value in trainer.state.metrics.fresh.items() if _is_number(value)}
        key = self.retention.best
        if key is not None and key in values:  # a metric of each rank's own must not make one rank alone save
            values[key] = agreement.mean_floats([values[key]])[0]
        (measured_at, before), iteration = self._measured, trainer.state.iteration
        self._measured = (iteration, before | values if measured_at == iteration else values)
        score = values.get(key) if key is not None else None
        if score is not None and math.isfinite(score) and self._is_better(score):
            self._best, self._due, self._must = score, True, True

    def _is_better(self, score: float) -> bool:
        if self._best is None:
            return True
        return score < self._best if self.retention.mode == "min" else score > self._best

    def _save_if_due(self, trainer: Trainer) -> None:
        state = trainer.state
        must = self._must or state.last or state.save_requested
        due = self._due or must
        self._due = self._must = False
        if self._saving is not None and (state.attention or state.last):
            self._finish(trainer)
        if not due or self._saved_at == _edge_of(trainer):
            return
        if self._saving is not None:
            if self.when_busy == "skip" and not must:
                logger.info("No checkpoint at iteration %d: the one before is still being written.", state.iteration)
                return
            self._finish(trainer)
        self._save(trainer, background=self.background and not state.last)

    def _save(self, trainer: Trainer, *, background: bool = False, exactness: Iterable[str] = ()) -> None:
        state = trainer.state
        state.checkpoints += 1  # it counts itself: the resumed run goes on with this number
        (shared, left_out), (local, own) = map(self.filter, trainer.registry.capture())
        if background:
            shared, local = self._snapshot.take((shared, local), _changed_by_step_alone(trainer))
        measured_at, values = self._measured
        save = partial(
            self.store.save,
            shared,
            local,
            iteration=state.iteration,
            epoch=state.epoch,
            metrics=values if measured_at == state.iteration else None,
            exactness=[*trainer.exactness(self.filter), *exactness],
            config=self.config,
            labels=self.labels,
            left_out=left_out | own,
            parent=self._resumed_from,
        )

        def write() -> Path:
            path = save(healthy=all_finite(shared.get("model", {})))
            self._prune()
            return path

        self._saved_at, self._saving_at = _edge_of(trainer), state.iteration
        if not background:
            started = time.perf_counter()
            self._report(trainer, write, lambda: time.perf_counter() - started)
            return
        self._saving = BackgroundSave(self._snapshot, write, trainer.request_attention)
        if isinstance(trainer.update, Update):
            # an average of the weights may stand in their place while they are evaluated
            changes = TrainingEvents.OPTIMIZER_STEP_STARTED | TrainingEvents.EVALUATION_STARTED
            self._before_step = trainer.add_event_handler(changes, self._before_change)
        else:
            self._saving.before_change()

    def _prune(self) -> None:
        try:
            self.store.apply(self.retention)
        except CheckpointError as error:  # one too many is no reason to stop
            logger.warning("%s", error)

    def _before_change(self, trainer: Trainer) -> None:
        if self._saving is not None:
            self._saving.before_change()
        if self._before_step is not None:
            self._before_step.remove()
            self._before_step = None

    def _finish(self, trainer: Trainer) -> None:
        """Wait for the save in the background and tell the bus how it ended."""
        self._before_change(trainer)
        saving, self._saving = self._saving, None
        assert saving is not None
        self._report(trainer, saving.result, lambda: saving.seconds)

    def _report(self, trainer: Trainer, result: Callable[[], Path], seconds: Callable[[], float]) -> None:
        state = trainer.state
        try:
            path = result()
        except CheckpointError as error:
            state.checkpoints -= 1
            self.error, self._saved_at = error, None
            trainer.fire_event(TrainingEvents.CHECKPOINT_FAILED)
            if state.last and self._saving_at == state.iteration:
                raise
            logger.warning("%s", error)
            return
        self.error, self._resumed_from = None, path.name
        state.checkpoint_path, state.saved_iteration, state.save_seconds = path, self._saving_at, seconds()
        trainer.fire_event(TrainingEvents.CHECKPOINT_SAVED)

    def _end(self, trainer: Trainer) -> None:
        """The run is over. What is still being written is waited for, but not by a run that is forced to end."""
        saving, failed, alone = self._saving, trainer.state.status == "failed", agreement.world_size() == 1
        self._saving = None
        # a peer that died never answers
        if saving is not None and failed and not saving.wait(None if alone else _PEERS_TIMEOUT_S):
            logger.warning("The checkpoint that was being written was given up: a peer does not answer.")
        if failed and alone and self.on_exception:
            with trainer.position.before_the_failure() as restartable:
                if restartable and self._saved_at != _edge_of(trainer):
                    self._save(trainer, exactness=["saved after an exception, random numbers as it left them"])

    _before_change.phase = Phase.EVALUATE  # type: ignore[attr-defined]  # before any handler that changes them


def _changed_by_step_alone(trainer: Trainer) -> Callable[[Tensor], bool]:
    """Tells what nobody changes before the next optimizer step or evaluation: trained weights and optimizers' states.

    Buffers, and parameters that are not trained, may be changed by the forward pass.
    """
    known: set[int] = set()
    for obj in trainer.registry.objects.values():
        if isinstance(obj, ModelState):
            known.update(each.data_ptr() for each in unwrap(obj.model).parameters() if each.requires_grad)
        elif isinstance(obj, OptimizerState):
            for values in obj.optimizer.state.values():
                known.update(each.data_ptr() for each in values.values() if isinstance(each, Tensor))
    return lambda tensor: tensor.data_ptr() in known


def _edge_of(trainer: Trainer) -> tuple[int, int]:
    """Iteration and epochs completed: one iteration has two edges where unsized data proves to be at its end."""
    return trainer.state.iteration, trainer.position.epochs_completed


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
