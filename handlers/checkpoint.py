"""Save at an event, at the end and on a stop; resume from the newest valid checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents, agreement
from ignite_engine.checkpointing import CheckpointError, CheckpointStore, Retention, all_finite

logger = logging.getLogger(__name__)


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

    A save that fails fires ``CHECKPOINT_FAILED`` and training goes on; the one at the end of the run raises.
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
        name: str = "checkpoint",
    ) -> None:
        self.store = CheckpointStore(directory)
        self.retention = Retention(
            keep_last=keep_last, keep_best=keep_best, best=best, mode=mode, keep_every=keep_every
        )
        self.config, self.name = config, name
        self.error: CheckpointError | None = None
        """Why the last save failed; None: it did not."""
        self._trainer: Trainer | None = None
        self._due = False
        self._saved_at: tuple[int, int] | None = None
        self._best: float | None = None
        self._measured: tuple[int, dict[str, float]] = (-1, {})
        self._resumed_from: str | None = None

    def attach(self, trainer: Trainer, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Save at the edge after ``event``; always at the end and on a stop."""
        self._trainer = trainer
        trainer.register(self.name, self)
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
            CheckpointError: it is valid but cannot be read.
            RuntimeError: it is not attached to a trainer yet.
        """
        if self._trainer is None:
            raise RuntimeError("Checkpoint.resume() needs a trainer: call attach(trainer, event) before.")
        found = self.store.latest().checkpoint if agreement.rank() == 0 else None
        path: Path | None = agreement.gather_objects(found.path if found else None)[0]
        if path is None:
            return None
        loaded = self.store.load(path, agreement.rank())
        local = loaded.local or {name: part for name, part in self.store.load(path, 0).local.items() if name != "rng"}
        if loaded.manifest.world_size != agreement.world_size():
            logger.warning(
                "%s was saved by %d ranks, now there are %d: the resumed run is not bit for bit.",
                path.name,
                loaded.manifest.world_size,
                agreement.world_size(),
            )
        self._trainer.registry.load({**loaded.shared, **local}, source=str(path), ignore=ignore)
        self._saved_at, self._resumed_from = _edge_of(self._trainer), path.name
        logger.info("Resumed from %s.", path)
        return path

    def state_dict(self) -> dict[str, Any]:
        """The best value so far; which checkpoints there are is read from disk."""
        return {"best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = state["best"]

    def _start(self, trainer: Trainer) -> None:
        self._due = False
        if trainer.state.iteration == 0:
            self._saved_at = None
        self.store.sweep()

    def _measure(self, trainer: Trainer) -> None:
        values = {key: float(value) for key, value in trainer.state.metrics.fresh.items() if _is_number(value)}
        key = self.retention.best
        if key is not None and key in values:  # a metric of each rank's own must not make one rank alone save
            values[key] = agreement.mean_floats([values[key]])[0]
        (measured_at, before), iteration = self._measured, trainer.state.iteration
        self._measured = (iteration, before | values if measured_at == iteration else values)
        score = values.get(key) if key is not None else None
        if score is not None and math.isfinite(score) and self._is_better(score):
            self._best, self._due = score, True

    def _is_better(self, score: float) -> bool:
        if self._best is None:
            return True
        return score < self._best if self.retention.mode == "min" else score > self._best

    def _save_if_due(self, trainer: Trainer) -> None:
        state = trainer.state
        due = self._due or state.last or state.save_requested
        self._due = False
        if due and self._saved_at != _edge_of(trainer):
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        state = trainer.state
        state.checkpoints += 1
        shared, local = trainer.registry.capture()
        measured_at, values = self._measured
        try:
            path = self.store.save(
                shared,
                local,
                iteration=state.iteration,
                epoch=state.epoch,
                metrics=values if measured_at == state.iteration else None,
                exactness=trainer.exactness(),
                config=self.config,
                parent=self._resumed_from,
                healthy=all_finite(shared.get("model", {})),
            )
        except CheckpointError as error:
            state.checkpoints -= 1
            self.error = error
            trainer.fire_event(TrainingEvents.CHECKPOINT_FAILED)
            if state.last:
                raise
            logger.warning("%s", error)
            return
        self.error, self._saved_at, self._resumed_from = None, _edge_of(trainer), path.name
        state.checkpoint_path = path
        trainer.fire_event(TrainingEvents.CHECKPOINT_SAVED)
        try:
            self.store.apply(self.retention)
        except CheckpointError as error:  # one too many is no reason to stop
            logger.warning("%s", error)


def _edge_of(trainer: Trainer) -> tuple[int, int]:
    """Iteration and epochs completed: one iteration has two edges where unsized data proves to be at its end."""
    return trainer.state.iteration, trainer.position.epochs_completed


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
