"""Saves a run at step boundaries, in the loop or in the background, and fires the events of a save."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ignite_engine import rng
from ignite_engine.checkpoint.lock import DirectoryInUse, held
from ignite_engine.checkpoint.manifest import Facts, Manifest
from ignite_engine.checkpoint.pack import Pack
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.save_options import SaveOptions
from ignite_engine.checkpoint.shards import Shards, without_shards
from ignite_engine.checkpoint.snapshot import Snapshot
from ignite_engine.checkpoint.states.model_and_optimizer import ModelState
from ignite_engine.checkpoint.states.tiers import TIERS, Tier, marker
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import CheckpointError, one_line, shortened
from ignite_engine.events import TrainingEvents
from ignite_engine.ranks import agreement
from ignite_engine.state import Start
from ignite_engine.text import in_units

if TYPE_CHECKING:
    from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)
_Saved = tuple[Path, float]
"""The path of a checkpoint, and the seconds from its step boundary to its commit."""
_SHOWN_FROM_S = 1.0
"""Shorter saves are not shown on the console, in seconds."""

_PEERS_TIMEOUT_S = 60.0
_Captured = tuple[Mapping[str, Any], Mapping[str, Any], Shards | None, Facts]


@dataclass
class Times:
    """Durations and sizes of one process's saves and loads: of the last save and the last load, or None."""

    saves: int = 0
    """The number of committed saves."""
    waited_s: float = 0.0
    """The total time for which training waited for saves, in seconds."""
    save_s: float | None = None
    """From the step boundary to the commit on all ranks."""
    save_bytes: int | None = None
    load_s: float | None = None
    """From the choice of the checkpoint, with its verification, to the end of the load."""
    load_bytes: int | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the body as waiting."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began

    def saved(self, manifest: Manifest, seconds: float) -> str:
        """Record a save, and describe it."""
        self.saves, self.save_s, self.save_bytes = self.saves + 1, seconds, _bytes_of(manifest)
        return _in_words(self.save_bytes, seconds)

    def loaded(self, manifest: Manifest, seconds: float) -> str:
        """Record a load, and describe it."""
        self.load_s, self.load_bytes = seconds, _bytes_of(manifest)
        return _in_words(self.load_bytes, seconds)


def _bytes_of(manifest: Manifest) -> int:
    return sum(file.bytes for file in manifest.files.values())


def _in_words(count: int, seconds: float) -> str:
    return f"{in_units(count)} in {seconds:.3g} s, {in_units(round(count / max(seconds, 1e-9)))}/s"


class Saver:
    """Saves what is registered with a trainer, one save at a time, and prunes after each.

    Args:
        directory: of the run's checkpoints, shared by all ranks.
        options: define what is saved, how, and what is kept.
        metrics_of: returns the metrics of this step boundary.
    """

    def __init__(
        self,
        directory: str | Path,
        options: SaveOptions,
        metrics_of: Callable[[Trainer], dict[str, float] | None] = lambda trainer: None,
    ) -> None:
        self.store = CheckpointStore(Path(directory).absolute())
        self.options, self.filter, self.metrics_of = options, options.filter, metrics_of
        self.tiers: Mapping[str, Tier] = {}
        self.times = Times()
        self.error: CheckpointError | None = None
        """Why the last save failed; None if it did not."""
        self.parent: str | None = None
        """The name of the checkpoint that the run saved last, or was resumed from."""
        self.run_id: str | None = None
        """The id of the current run; None before the first run."""
        self.has_run = False
        """Whether a run was resumed or started, so that :attr:`run_id` is set."""
        self._saving: Future[_Saved] | None = None
        self._snapshot = Snapshot()
        self._pruning: threading.Thread | None = None
        self._prune_failure = ""
        self._held = contextlib.ExitStack()
        self._saved_at: tuple[int, int] | None = None
        self._saving_at = -1
        self._saved_evaluations = 0

    @property
    def busy(self) -> bool:
        """Whether a background save is being written, or has ended and was not reported yet."""
        return self._saving is not None

    def has_saved(self, trainer: Trainer) -> bool:
        """Whether the present step boundary was saved, or is being saved."""
        return self._saved_at == boundary_of(trainer)

    def forget_boundary(self) -> None:
        """The state has changed since this step boundary was saved."""
        self._saved_at = None

    def has_evaluated_since(self, trainer: Trainer) -> bool:
        """Whether an evaluation has completed since the run was saved or resumed."""
        return trainer.state.evaluations != self._saved_evaluations

    def resumed(self, trainer: Trainer, checkpoint: CheckpointInfo, *, on_disk: bool = True) -> None:
        """Continue after a resume from a checkpoint.

        Args:
            on_disk: False: it was a copy in memory, so this step boundary is not saved on disk.
        """
        manifest = checkpoint.manifest
        self._saved_at = boundary_of(trainer) if on_disk else None
        self._saved_evaluations = trainer.state.evaluations
        self.parent = checkpoint.path.name if on_disk else manifest.parent
        self.run_id, self.has_run = manifest.run_id, True

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add metrics that were measured after the save of this boundary; a collective. A failure is a warning."""
        assert self.parent is not None
        self.settle()
        try:
            self.store.add_metrics(self.store.directory / self.parent, metrics)
        except CheckpointError as error:  # as with a failed save, training continues
            logger.warning("%s", error)

    def start(self, trainer: Trainer) -> None:
        """Called when a run starts: check what will be saved, take the folder and clean it; a collective.

        Raises:
            CheckpointError: a registered object cannot be saved, or another process uses the folder.
            StateMismatch: ``exclude`` has a pattern that matches nothing.
        """
        if trainer.state.start is Start.FRESH:
            self._saved_at = None
        if trainer.state.start is Start.FRESH or not self.has_run:
            self.run_id, self.has_run = agreement.on_rank_0(lambda: secrets.token_hex(8)), True
        with contextlib.ExitStack() as started:
            started.enter_context(self.holding(trainer))
            agreement.agreed(lambda: self._check_registered(trainer))
            agreement.on_rank_0(lambda: self._forget_earlier_runs(trainer))
            self.store.sweep()
            self._held = started.pop_all()
        if self._saved_at is not None:  # resumed: the last process may have been killed before its prune
            self._prune()
            self.settle()

    @contextlib.contextmanager
    def holding(self, trainer: Trainer) -> Iterator[None]:
        """Take the folder for the body, and make it if it is missing; a collective.

        Raises:
            CheckpointError: another process uses it, or it cannot be made; the same on all ranks.
        """
        directory = self.store.directory
        with contextlib.ExitStack() as stack:
            if agreement.world_size() > 1:  # a separate group, as a background save communicates in another thread
                self.store = CheckpointStore(directory, stack.enter_context(agreement.lent_group("checkpoints")))
            stack.callback(self.settle)
            self.filter.check(trainer.registry.capture, trainer.registry.kinds)

            def take() -> None:
                try:
                    directory.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(held(directory))
                except DirectoryInUse as holder:
                    raise CheckpointError(
                        f"{directory} is in use by {holder}, which saves its checkpoints there: wait until it has "
                        "ended, or give this run another directory."
                    ) from None
                except OSError as error:  # an error now; later a failed save does not end the run
                    raise CheckpointError(
                        f"The folder of checkpoints {directory} cannot be made: {error.strerror}. Give Checkpoint "
                        "another one."
                    ) from None

            agreement.on_rank_0(take)
            yield

    def _forget_earlier_runs(self, trainer: Trainer) -> None:
        """Remove markers of unused tiers, and log which checkpoints a fresh run replaces."""
        directory = self.store.directory
        for name in TIERS.keys() - self.tiers.keys():
            with contextlib.suppress(OSError):
                os.unlink(directory / marker(name))
        if trainer.state.start is Start.FRESH and (others := self.store.checkpoints()):
            logger.warning(
                "%s holds %d checkpoints of an earlier run, which are deleted as this one saves its own; to continue "
                "from %s, call checkpoint.resume() before run().",
                *(directory, len(others), others[-1].path.name),
            )

    def release(self) -> None:
        """Release the folder; a collective."""
        self.settle()
        self._held.close()

    def _check_registered(self, trainer: Trainer) -> None:
        """Refuse objects that cannot be saved, before training."""
        own = {"data", "rng", "trainer"}  # asking a loader for its state may start workers
        states = {name: obj.state_dict() for name, obj in trainer.registry.objects.items() if name not in own}
        states = self.filter(states, trainer.registry.kinds)[0]
        Pack(without_shards(states, {})[0])
        for name, obj in trainer.registry.objects.items():
            if isinstance(obj, ModelState) and (lost := sorted({*obj.untaken()} & states.get(name, {}).keys())):
                raise CheckpointError(
                    f"The {name} does not load {shortened(lost)} of its own state_dict(): leave that layer, if it is "
                    f"not trained, out by Checkpoint(exclude=['{name}:{lost[0].rpartition('.')[0]}*'])."
                )

    def save(
        self,
        trainer: Trainer,
        *,
        background: bool = False,
        metrics: Mapping[str, float] | None = None,
        reasons: Iterable[str] = (),
    ) -> None:
        """Save at this step boundary; a collective. No other save may be :attr:`busy`.

        Args:
            background: write while training continues.
            metrics: of this iteration.
            reasons: further reasons for the reproducibility report.

        Raises:
            CheckpointError: the last save of the run failed; other failures fire CHECKPOINT_FAILED.
        """
        state = trainer.state
        self.settle()
        state.checkpoints += 1  # the count includes this save, as a resumed run continues from it
        self._saved_at, self._saving_at = boundary_of(trainer), state.iteration
        self._saved_evaluations = state.evaluations
        started = time.perf_counter()
        captured: list[_Captured] = []
        try:
            with self.times.waiting():
                agreement.agreed(lambda: captured.append(self._capture(trainer, background)))
        except Exception as error:  # an error in a user's state_dict must not end the training
            failure = CheckpointError(
                f"The checkpoint of iteration {state.iteration} was not saved: {one_line(error).rstrip('.')}."
            )
            failure.__cause__ = error
            self._failed(trainer, failure)
            return
        ((shared, local, shards, facts),) = captured
        facts |= {"metrics": metrics, "reproducibility": [*facts["reproducibility"], *reasons]}
        save = partial(self.store.save, shared, local, iteration=state.iteration, epoch=state.epoch, shards=shards)
        weights = [name for name, kind in facts["kinds"].items() if kind == "model"]

        def write() -> _Saved:
            path = save(writers=self.options.writers, weights=weights, wait=self._snapshot.wait, **facts)
            return path, time.perf_counter() - started

        if background:
            self._saving = _in_thread(write, trainer.report_background_done)
        else:
            self._report(trainer, write)

    def _capture(self, trainer: Trainer, background: bool) -> _Captured:
        """Collect the shared parts, this rank's own parts, their sharding and the facts for the manifest.

        For a background save the parts are copies.
        """
        trainer.registry.flush_to_disk()
        kinds = trainer.registry.kinds
        shared, local, left_out = self.parts(trainer)
        facts: Facts = {
            **self.options.facts,
            "reproducibility": trainer.reproducibility(self.filter),
            "left_out": left_out,
            "kinds": dict(kinds),
            "parent": self.parent,
            "run_id": self.run_id,
            "evaluated_with": trainer.registry.evaluated_with(),
        }
        if not background:
            return shared, local, None, facts  # the store takes it out
        shared, local, shards = without_shards(shared, local)
        shared, local = self._snapshot.take((shared, local))
        return shared, local, shards, facts

    def parts(self, trainer: Trainer) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, list[str]]]:
        """The shared parts, this rank's own parts, and the names that are left out, at this step boundary."""
        kinds = trainer.registry.kinds
        (shared, left_out), (local, own) = (self.filter(parts, kinds) for parts in trainer.registry.capture())
        return shared, local, left_out | own

    def has_written(self) -> bool:
        """Whether the background save has ended on some rank; a collective."""
        assert self._saving is not None
        return any(agreement.gather_objects(self._saving.done()))

    def finish(self, trainer: Trainer) -> None:
        """Wait for the background save and fire its event; a collective."""
        saving, self._saving = self._saving, None
        assert saving is not None
        self._report(trainer, saving.result, ", beside training")

    def end(self, trainer: Trainer) -> None:
        """Called when the run is over: a failed run waits for a background save that is still being written."""
        saving, self._saving = self._saving, None
        if saving is None or trainer.state.status != "failed":
            return
        timeout_s = None if agreement.world_size() == 1 else _PEERS_TIMEOUT_S  # a dead peer never answers
        if wait([saving], timeout_s).not_done:
            logger.warning("The checkpoint that was being written was given up: a peer does not answer.")

    def settle(self) -> None:
        """Wait for the end of a prune."""
        if self._pruning is not None:
            with self.times.waiting():
                self._pruning.join()
            self._pruning = None

    def _prune(self) -> None:
        """Prune in a thread: deleting a large file may take longer than a save."""
        if agreement.rank() == 0:
            self._pruning = threading.Thread(target=self._delete, name="checkpoint-pruning", daemon=True)
            self._pruning.start()

    def _delete(self) -> None:
        try:
            self.store.prune(self.options)
        except CheckpointError as error:  # an extra checkpoint is no reason to stop
            if str(error) != self._prune_failure:
                logger.warning("%s", error)
            self._prune_failure = str(error)

    def _report(self, trainer: Trainer, result: Callable[[], _Saved], how: str = "") -> None:
        state = trainer.state
        try:
            with self.times.waiting():
                path, seconds = result()
        except CheckpointError as error:
            self._failed(trainer, error)
            return
        self.error, self.parent = None, path.name
        state.checkpoint_path, state.saved_iteration, state.save_seconds = path, self._saving_at, seconds
        assert self.store.last_saved is not None
        words = self.times.saved(self.store.last_saved, seconds)
        if agreement.rank() == 0:
            logger.info("Saved %s: %s%s.", path, words, how, extra={"console": seconds >= _SHOWN_FROM_S})
        self._prune()
        tell(trainer, TrainingEvents.CHECKPOINT_SAVED)
        for tier in self.tiers.values():
            tier.push(path)

    def _failed(self, trainer: Trainer, error: CheckpointError) -> None:
        state = trainer.state
        state.checkpoints -= 1
        self.error, self._saved_at = error, None
        tell(trainer, TrainingEvents.CHECKPOINT_FAILED)
        if state.last and self._saving_at == state.iteration:
            error.on_all_ranks = True
            raise error
        logger.warning("%s", error)


def _in_thread(work: Callable[[], _Saved], done: Callable[[], None]) -> Future[_Saved]:
    """Call ``work``, then ``done``, in a daemon thread.

    A process that is forced to end does not wait for it; it leaves only a temporary directory on disk.
    """
    future: Future[_Saved] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            done()

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def tell(trainer: Trainer, event: TrainingEvents) -> None:
    """Fire an event that a run resumed from this checkpoint does not fire, without changing random states."""
    with rng.isolated():
        trainer.fire_event(event)


def boundary_of(trainer: Trainer) -> tuple[int, int]:
    """Identifies a step boundary: iteration and completed epochs, as the end of unsized data is a second boundary."""
    return trainer.state.iteration, trainer.progress.epochs_completed
