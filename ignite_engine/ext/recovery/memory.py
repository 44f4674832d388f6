"""The memory tier: copies of the state in shared memory, and the choice of a copy at a resume."""

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
from ignite_engine.checkpoint.filesystem import FileRecord
from ignite_engine.checkpoint.manifest import Manifest
from ignite_engine.checkpoint.pack import Pack
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.shards import PIECES, add_pieces, join, without_shards
from ignite_engine.checkpoint.states.loading import layout_of_models
from ignite_engine.checkpoint.states.tiers import Fetched, Folder, Offer, SavedRun, Tier, order
from ignite_engine.checkpoint.store import Loaded
from ignite_engine.errors import CheckpointError, Interrupted, PeerFailed, check_type, is_whole, one_line
from ignite_engine.events import TrainingEvents
from ignite_engine.ext.recovery import slots
from ignite_engine.ext.recovery.slots import Boundary, Header, Slots
from ignite_engine.ranks import agreement, watch

if TYPE_CHECKING:
    from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)
_SHARE = 0.01
"""The share of the time that copies may take with ``auto``."""
_MEASURED = 5
"""The number of copies from which the cost is measured; the first makes the slots and does not count."""


class MemoryTier(Tier):
    """Copies the state of a run into shared memory at step boundaries.

    Args:
        value: the number of iterations between copies; ``auto``: the smallest that costs at most 1 % of the time.
        run: the run that is saved; copies of a run with another config are not used.

    Raises:
        TypeError, ValueError: one line about ``value``.
    """

    def __init__(self, value: Any, run: SavedRun) -> None:
        check_type("memory", value, value == "auto" or is_whole(value), "a whole number, 'auto' or None")
        if isinstance(value, int) and value < 1:
            raise ValueError(f"memory must be at least 1 iteration, 'auto' or None, got {value}.")
        self._run, self._directory = run, run.store.directory
        self._every = value if isinstance(value, int) else None
        values = {**(run.options.config or {})}
        if isinstance(section := values.get("run"), Mapping):
            values["run"] = {key: value for key, value in section.items() if key != "directory"}  # which may be moved
        # computed now, as a resume writes the settings in force into the config
        settings = json.dumps([ignite_engine.__version__, values], sort_keys=True, default=str)
        self._settings = blake3(settings.encode()).hexdigest()
        self._slots: Slots | None = None
        self._held: dict[tuple[int, ...], Boundary] = {}
        self._resumed: int | None = None
        """The number of the copy from which the next run continues."""
        self._is_on = False

    def __str__(self) -> str:
        return "memory"

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self._copy)

    # -- what a resume may take -------------------------------------------------------------------------------------

    def candidates(self) -> Offer:
        """The copies that all ranks hold, unless a checkpoint that they followed is gone."""
        self._resumed, found = None, self._found()
        on_disk = agreement.on_rank_0(lambda: [each.manifest.sequence for each in self._run.store.checkpoints()])
        newest = max(on_disk, default=0)
        if any(header.sequence > newest for header in found):
            _ignore("the newest checkpoint that it knew is gone")
            return Offer([])
        infos = [self._described(header, sequence=header.sequence + 1) for header in found]
        self._held = {order(info): header.boundary for info, header in zip(infos, found, strict=True)}
        return Offer(infos)

    def fetch(self, candidate: CheckpointInfo, folder: Folder) -> Fetched:
        boundary = self._held[order(candidate)]
        fetched = agreement.together(lambda: self._read(boundary))
        self._resumed = boundary.number
        return fetched

    def _found(self) -> list[Header]:
        """The headers, on rank 0, of the copies that all ranks hold; a collective."""
        name = agreement.on_rank_0(lambda: slots.folder_name(self._directory))
        if name is None:
            return []
        self._slots = self._slots or Slots.open(name)
        mine = {} if self._slots is None else self._slots.copies(agreement.rank(), self._settings)
        has_some = self._slots is not None and bool(self._slots.ranks())
        everyone = agreement.gather_objects((list(mine), has_some))
        on_all = [boundary for boundary in mine if all(boundary in of_rank for of_rank, _ in everyone)]
        if not on_all and any(has_some for _, has_some in everyone):
            _ignore("it is torn or damaged, of other settings, or the ranks do not hold the same iteration")
        return agreement.broadcast_object([mine[boundary][0][1] for boundary in on_all])

    def _read(self, boundary: Boundary) -> Fetched:
        """Read and verify a copy, in the form of a checkpoint."""
        assert self._slots is not None
        local: dict[int, Mapping[str, Any]] = {}
        shared: Mapping[str, Any] = {}
        pieces: Any = {}
        info: CheckpointInfo | None = None
        for slot, header, takes_all in self._slots.copies(agreement.rank(), self._settings).get(boundary, []):
            facts, parts = slot.read(in_place=not takes_all)
            add_pieces(pieces, parts.pop(PIECES, {}), lambda: None)
            names = facts.pop("shared")
            if takes_all and header.has_shared:
                info, shared = self._described(header, **facts), {name: parts.pop(name) for name in names}
            if takes_all:
                local[header.rank] = parts
        if info is None:
            raise CheckpointError("it is gone")
        if pieces:
            try:
                shared, local = join(shared, pieces), {rank: join(parts, pieces) for rank, parts in local.items()}
            except ValueError as error:
                raise CheckpointError(one_line(error)) from None
        path, manifest, of_all = info.path, info.manifest, shared

        def load(rank: int, *, shared: bool = True, **how: object) -> Loaded:
            return Loaded(path, manifest, dict(of_all) if shared else {}, dict(local.get(rank, {})))

        return Fetched(info, load, str(self), is_committed=False)

    def _described(self, header: Header, **facts: Any) -> CheckpointInfo:
        """The info of a copy in the form of a checkpoint's; its path is the file that names the slots."""
        path, boundary = self._directory / slots.MARKER, header.boundary
        known = {"epoch": boundary.epochs_completed, "sequence": header.sequence, "metrics": {}, **facts}
        manifest = Manifest(
            **known,
            iteration=boundary.iteration,
            world_size=boundary.world_size,
            run_id=boundary.run_id,
            config=None,
            versions={},
            files={path.name: FileRecord(header.size, f"sums:{header.checksum}")},
            parts={},
            created_at="",
        )
        return CheckpointInfo(path, manifest)

    # -- the run ------------------------------------------------------------------------------------------------------

    def begin(self, trainer: Trainer) -> None:
        """Prepare for copies; present copies are stale, except the one that the run was resumed from."""
        layout, rank = layout_of_models(trainer.registry.objects.values()), agreement.rank()
        resumed, self._resumed = self._resumed, None
        on_disk = self._run.store.checkpoints()
        self._sequence = max((checkpoint.manifest.sequence for checkpoint in on_disk), default=0)
        self._environment = environment_values(agreement.world_size()) | {"sharding": layout}
        self._number = self._began_with = resumed or 0
        self._began_at, self._left_at = trainer.state.iteration, time.perf_counter()
        self._reasons: tuple[Any, list[str]] = None, []
        self._times: list[tuple[float, float]] = []
        """The duration of each copy, and of the iterations before it, in seconds."""
        self._problem: str | None = None
        self._is_agreed, self._is_sharded = False, bool(layout)
        try:
            nodes = agreement.agreed(slots.node)
            name = agreement.on_rank_0(lambda: slots.named_folder(self._directory))
            self._writes_shared = nodes.index(nodes[rank]) == rank
            if layout and len(set(nodes)) > 1:
                raise OSError("the model is sharded over several machines")
            agreement.agreed(lambda: self._open(name, resumed))
        except OSError as error:
            self._give_up(one_line(error).rstrip("."))
        else:
            self._is_on = True

    def _open(self, name: str, resumed: int | None) -> None:
        if self._slots is None or self._slots.path.name != name:
            self._slots = Slots.made(name)
        if resumed is None:
            self._slots.drop(agreement.rank(), *self._absent())
        else:
            self._slots.forget_newer(agreement.rank(), resumed)
        if self._writes_shared:
            slots.clear()
            self._slots.note_owner(self._directory)

    def _absent(self) -> list[int]:
        """Ranks with slots here that this run does not have."""
        return [] if self._slots is None else [rank for rank in self._slots.ranks() if rank >= agreement.world_size()]

    def _copy(self, trainer: Trainer) -> None:
        """Copy at a step boundary, after a save; the first call that agrees is a collective."""
        iteration, every = trainer.state.iteration, self._every
        if not self._is_on or iteration <= self._began_at or trainer.state.last or iteration % (every or 1):
            return
        if every is None:  # else the copy would wait for the iteration, and its measured cost include it
            devices.wait_for_device()
        began = time.perf_counter()
        if self._problem is None:
            try:
                self._write(trainer)
            except PeerFailed:
                raise
            except Exception as error:  # as for a save, an error in a state_dict must not end the training
                self._problem = one_line(error).rstrip(".")
        self._times.append((time.perf_counter() - began, began - self._left_at))
        if not self._is_agreed and len(self._times) == (_MEASURED if every is None else 1):
            self._agree()
        if self._is_agreed and self._problem is not None:
            self._give_up(self._problem)
        self._left_at = time.perf_counter()

    def _agree(self) -> None:
        """Agree on whether all ranks copy, and how often."""
        self._is_agreed = True
        problems = agreement.gather_objects(self._problem)
        self._problem = next(filter(None, problems), None)
        if self._every is not None or self._problem is not None:
            return
        rows = agreement.gather_floats([statistics.median(column) for column in zip(*self._times[1:], strict=True)])
        cost, step = max(row[0] for row in rows), min(row[1] for row in rows)
        self._every = max(1, math.ceil(cost / (_SHARE * step)))
        if agreement.rank() == 0:
            logger.info(
                "The state is copied into memory every %d iterations: a copy takes %.3g ms, an iteration %.3g ms.",
                *(self._every, 1e3 * cost, 1e3 * step),
            )

    def _write(self, trainer: Trainer) -> None:
        state, run, rank = trainer.state, self._run, agreement.rank()
        assert self._slots is not None and run.run_id is not None
        saved = run.store.last_saved
        self._sequence = max(self._sequence, 0 if saved is None else saved.sequence)
        when = (state.epoch, state.windows, state.checkpoints)
        if self._reasons[0] != when:  # finding the reasons takes as long as a copy
            self._reasons = when, trainer.reproducibility(run.filter)
        shared, local, left_out = run.parts(trainer)
        if self._is_sharded:
            shared, local, _ = without_shards(shared, local)
        shared = shared if self._writes_shared else {}
        facts = {
            "epoch": state.epoch,
            "metrics": dict(run.metrics_of(trainer) or {}),
            "environment": self._environment,
            "reproducibility": self._reasons[1],
            "left_out": left_out,
            "kinds": dict(trainer.registry.kinds),
            "parent": run.parent,
            "shared": list(shared),
        }
        parts = {**shared, **local}
        self._number += 1
        if self._number == self._began_with + 2:  # all ranks have made the first copy
            self._slots.drop(*self._absent())
        boundary = Boundary(
            number=self._number,
            iteration=state.iteration,
            epochs_completed=trainer.progress.epochs_completed,
            world_size=agreement.world_size(),
            run_id=run.run_id,
            settings=self._settings,
        )
        header = Header(boundary, rank, self._writes_shared, self._is_sharded, self._sequence)
        self._slots.write(header, Pack([facts, parts]))

    def end(self, trainer: Trainer) -> None:
        """Keep the copies only if a new start may continue from them."""
        if self._is_on:
            self._leave(keep=trainer.progress.failed and _is_lost(sys.exception()))

    def _give_up(self, problem: str) -> None:
        self._leave(keep=False)
        logger.warning("No copies of the state in memory, as %s: checkpoints are on disk alone.", problem)

    def _leave(self, *, keep: bool) -> None:
        self._is_on = False
        if self._slots is not None:
            if not keep:
                self._slots.drop(agreement.rank(), *self._absent())
                if agreement.rank() == 0:
                    slots.remove(self._directory / slots.MARKER)
            self._slots.close(remove_if_empty=not keep)
            self._slots = None


def _ignore(reason: str) -> None:
    """Warn that the copies in memory are not used."""
    if agreement.rank() == 0:
        logger.warning("The state in memory is not used: %s.", reason)


def _is_lost(error: BaseException | None) -> bool:
    """Whether a run ended without its last checkpoint for a reason outside of its program: a peer was lost, the last
    save failed, or it was forced to end."""
    if isinstance(error, PeerFailed):
        failure = None if watch.current is None else watch.current.failure
        return failure is not None and failure.kind != "raised"
    if isinstance(error, CheckpointError | Interrupted | KeyboardInterrupt):
        return True
    return error is not None and watch.broken_collective(error) is not None  # the peer was not identified
