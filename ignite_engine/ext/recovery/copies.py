"""Copies of a run's state in shared memory: when they are made, and how a start finds the newest."""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from blake3 import blake3

import ignite_engine
from ignite_engine import devices
from ignite_engine.checkpointing import CheckpointInfo, CheckpointStore, SaveOptions
from ignite_engine.checkpointing.environment import environment_values
from ignite_engine.checkpointing.save_filter import SaveFilter
from ignite_engine.checkpointing.store import Checkpoints
from ignite_engine.errors import CheckpointError, Interrupted, PeerFailed, one_line
from ignite_engine.events import TrainingEvents
from ignite_engine.ext.recovery.memory import Copy, Memory, NewestState
from ignite_engine.ranks import agreement, watch
from ignite_engine.states.sharding import layout_of_models

if TYPE_CHECKING:
    from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)
_SHARE = 0.01
"""The share of the time that copies may take."""
_MEASURED = 5
"""Iterations after which it is known what a copy costs; the first makes the slots and does not count."""


class SavedRun(Protocol):
    """Where and how a run is saved, and what its checkpoints hold, which is what is copied."""

    store: CheckpointStore
    options: SaveOptions
    filter: SaveFilter
    run_id: str | None
    parent: str | None

    def parts(self, trainer: Trainer) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, list[str]]]:
        """Shared parts, this rank's own, and names that are left out."""


class MemoryCopies:
    """The place of a run's state in shared memory, into which it is copied at step boundaries.

    Args:
        run: its options say how often its state is copied, and copies made with another config are not used.
        metrics_of: what was measured at this step boundary.
    """

    replayed = False

    def __init__(self, run: SavedRun, metrics_of: Callable[[Trainer], Mapping[str, float] | None]) -> None:
        self._run, self._metrics_of = run, metrics_of
        values, every = {**(run.options.config or {})}, run.options.memory
        if isinstance(section := values.get("run"), Mapping):
            values["run"] = {key: value for key, value in section.items() if key != "directory"}  # which may be moved
        # now: a resume writes into the config what is in force
        settings = json.dumps([ignite_engine.__version__, values], sort_keys=True, default=str)
        self._memory = Memory(run.store.directory, blake3(settings.encode()).hexdigest())
        self._every = every if isinstance(every, int) else None
        self._is_on = self._is_agreed = False
        self._problem: str | None = None
        self._copy: Copy | None = None
        self._resumed: int | None = None
        self._sequence = 0
        self._began_at = -1
        self._environment: dict[str, Any] = {}
        self._reasons: tuple[Any, list[str]] = None, []
        self._left_at: float | None = None
        self._costs: list[float] = []
        self._steps: list[float] = []

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self.copy)

    def check_new(self) -> None:
        if self._memory.newest() is not None:
            raise CheckpointError(
                f"{self._memory.directory} holds the name of a copy in memory, but must_be_new was given: give another "
                "directory, or leave must_be_new out to resume."
            )

    def in_front_of(self, store: Checkpoints) -> Checkpoints:
        """The store, with the newest copy that all ranks can load."""
        self._copy = self._memory.newest()
        return NewestState(store, self._copy)

    def resumed(self, found: CheckpointInfo | None) -> str | None:
        """The copy is dropped from the memory of this process, whether or not it is what was resumed."""
        copy, self._copy = self._copy, None
        is_copy = copy is not None and found is not None and found.path == copy.info.path
        self._resumed = copy.header.number if copy is not None and is_copy else None
        return "memory" if is_copy else None

    def begin(self, trainer: Trainer) -> None:
        resumed, self._resumed = self._resumed, None
        layout = layout_of_models(trainer.registry.objects.values())
        self._problem = self._memory.begin(resumed, sharded=bool(layout))
        self._is_on, self._is_agreed = self._problem is None, False
        self._end_if_impossible()
        on_disk = self._run.store.checkpoints()
        self._sequence = max((checkpoint.manifest.sequence for checkpoint in on_disk), default=0)
        self._environment = environment_values(agreement.world_size()) | {"sharding": layout}
        self._began_at, self._reasons = trainer.state.iteration, (None, [])
        self._left_at, self._costs, self._steps = None, [], []

    def copy(self, trainer: Trainer) -> None:
        """At a step boundary, after a save that is due there; now and then a collective."""
        iteration, every = trainer.state.iteration, self._every
        if not self._is_on or iteration <= self._began_at or trainer.state.last:
            return
        if every is not None and iteration % every:
            return
        if every is None:  # the copy is not to wait for the iteration, which would count as its cost
            devices.wait_for_device()
        began, alone = time.perf_counter(), self._is_agreed
        if self._problem is None:
            self._problem = self._try(trainer)
        ended = time.perf_counter()
        if every is None and self._left_at is not None:
            self._costs.append(ended - began)
            self._steps.append(began - self._left_at)
        if not self._is_agreed and (every is not None or (self._costs and iteration >= self._began_at + _MEASURED)):
            self._agree()
        self._end_if_impossible(alone=alone)
        self._left_at = time.perf_counter()

    def _agree(self) -> None:
        """All ranks copy, or none does; and how often."""
        self._is_agreed = True
        self._problem = next(filter(None, agreement.gather_objects(self._problem)), None)
        if self._every is not None or self._problem is not None:
            return
        rows = agreement.gather_floats([statistics.median(self._costs), statistics.median(self._steps)])
        cost, step = max(row[0] for row in rows), min(row[1] for row in rows)
        self._every = max(1, math.ceil(cost / (_SHARE * step)))
        if agreement.rank() == 0:
            logger.info(
                "The state is copied into memory every %d iterations: a copy takes %.3g ms, an iteration %.3g ms.",
                *(self._every, 1e3 * cost, 1e3 * step),
            )

    def _end_if_impossible(self, *, alone: bool = False) -> None:
        """Once nothing is to be agreed on, end the copies where they cannot be made.

        Args:
            alone: the other ranks have not agreed on it, and do not say so.
        """
        if self._problem is not None and (self._is_agreed or not self._is_on):
            if self._is_on:
                self._is_on = False
                self._memory.end()
            logger.log(
                logging.WARNING if alone or agreement.rank() == 0 else logging.INFO,
                "No copies of the state in memory, as %s: checkpoints are on disk alone.",
                self._problem,
            )

    def _try(self, trainer: Trainer) -> str | None:
        """Copy the state; why that failed."""
        state, run = trainer.state, self._run
        saved = run.store.last_saved
        self._sequence = max(self._sequence, 0 if saved is None else saved.sequence)
        when = (state.epoch, state.windows, state.checkpoints)
        if self._reasons[0] != when:  # to find them takes as long as the copy
            self._reasons = when, trainer.reproducibility(run.filter)
        try:
            shared, local, left_out = run.parts(trainer)
            facts = {
                "epoch": state.epoch,
                "sequence": self._sequence,
                "metrics": dict(self._metrics_of(trainer) or {}),
                "environment": self._environment,
                "reproducibility": self._reasons[1],
                "left_out": left_out,
                "kinds": dict(trainer.registry.kinds),
                "parent": run.parent,
            }
            assert run.run_id is not None
            boundary = {"iteration": state.iteration, "epochs_completed": trainer.progress.epochs_completed}
            self._memory.write(facts, shared, local, **boundary, run_id=run.run_id)
        except PeerFailed:
            raise
        except Exception as error:  # as with a save: a state_dict of the user's that raises must not end the training
            return one_line(error).rstrip(".")
        return None

    def end(self, trainer: Trainer) -> None:
        """What was copied stays where a start may go on from there."""
        if self._is_on:
            self._is_on = False
            self._memory.end(keep=trainer.progress.failed and _is_lost(sys.exception()))


def _is_lost(error: BaseException | None) -> bool:
    """Whether a run ends without its last checkpoint by no mistake of its program: a peer was lost, its last save
    failed, or it was forced to end."""
    if isinstance(error, PeerFailed):
        failure = None if watch.current is None else watch.current.failure
        return failure is not None and failure.kind != "raised"
    if isinstance(error, CheckpointError | Interrupted | KeyboardInterrupt):
        return True
    return error is not None and watch.broken_collective(error) is not None  # the peer was not learned in time
