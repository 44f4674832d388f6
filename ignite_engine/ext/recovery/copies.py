"""The state of a run in shared memory as a tier: when copies are made, and which of them a resume may take."""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from blake3 import blake3

import ignite_engine
from ignite_engine import devices
from ignite_engine.checkpoint.environment import environment_values
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.states.loading import layout_of_models
from ignite_engine.checkpoint.states.tiers import Fetched, Folder, Offer, SavedRun, Tier, order
from ignite_engine.errors import CheckpointError, Interrupted, PeerFailed, check_type, is_whole, one_line
from ignite_engine.events import TrainingEvents
from ignite_engine.ext.recovery.memory import Memory, ignore
from ignite_engine.ext.recovery.slots import Boundary
from ignite_engine.ranks import agreement, watch

if TYPE_CHECKING:
    from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)
_SHARE = 0.01
"""The share of the time that copies may take."""
_MEASURED = 5
"""Iterations after which it is known what a copy costs; the first makes the slots and does not count."""


class MemoryTier(Tier):
    """The state of a run in shared memory, into which it is copied at step boundaries.

    Args:
        value: after how many iterations, or ``auto``: as few as cost at most 1 % of the time.
        run: copies that were made with another config are not used.

    Raises:
        TypeError, ValueError: one line about ``value``.
    """

    def __init__(self, value: Any, run: SavedRun) -> None:
        check_type("memory", value, value == "auto" or is_whole(value), "a whole number, 'auto' or None")
        if isinstance(value, int) and value < 1:
            raise ValueError(f"memory must be at least 1 iteration, 'auto' or None, got {value}.")
        self._run = run
        values = {**(run.options.config or {})}
        if isinstance(section := values.get("run"), Mapping):
            values["run"] = {key: value for key, value in section.items() if key != "directory"}  # which may be moved
        # now: a resume writes into the config what is in force
        settings = json.dumps([ignite_engine.__version__, values], sort_keys=True, default=str)
        self._memory = Memory(run.store.directory, blake3(settings.encode()).hexdigest())
        self._every = value if isinstance(value, int) else None
        self._is_on = self._is_agreed = False
        self._problem: str | None = None
        self._held: dict[tuple[int, ...], Boundary] = {}
        self._resumed: int | None = None
        self._sequence = 0
        self._began_at = -1
        self._environment: dict[str, Any] = {}
        self._reasons: tuple[Any, list[str]] = None, []
        self._left_at: float | None = None
        self._costs: list[float] = []
        self._steps: list[float] = []

    def __str__(self) -> str:
        return "memory"

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self.copy)

    def check_new(self) -> None:
        if self._memory.candidates():
            raise CheckpointError(
                f"{self._memory.directory} holds the name of a copy in memory, but must_be_new was given: give another "
                "directory, or leave must_be_new out to resume."
            )

    def candidates(self) -> Offer:
        """Copies that all ranks hold, each newer than the checkpoint that was the newest when it was made."""
        self._resumed, found = None, self._memory.candidates()
        on_disk = agreement.on_rank_0(lambda: [each.manifest.sequence for each in self._run.store.checkpoints()])
        newest = max(on_disk, default=0)
        if any(header.sequence > newest for header in found.values()):
            ignore("the newest checkpoint that it knew is gone")
            return Offer([])
        infos = {
            boundary: self._memory.described(header, sequence=header.sequence + 1) for boundary, header in found.items()
        }
        self._held = {order(info): boundary for boundary, info in infos.items()}
        return Offer([*infos.values()])

    def fetch(self, candidate: CheckpointInfo, folder: Folder) -> Fetched:
        boundary = self._held[order(candidate)]
        info, load = self._memory.read(boundary)
        self._resumed = boundary[0]
        return Fetched(info, load, str(self), is_committed=False)

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
                "metrics": dict(run.metrics_of(trainer) or {}),
                "environment": self._environment,
                "reproducibility": self._reasons[1],
                "left_out": left_out,
                "kinds": dict(trainer.registry.kinds),
                "parent": run.parent,
            }
            assert run.run_id is not None
            boundary = {"iteration": state.iteration, "epochs_completed": trainer.progress.epochs_completed}
            self._memory.write(facts, shared, local, **boundary, sequence=self._sequence, run_id=run.run_id)
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
