"""The tiers of a run's checkpoints: its folder and those in TIERS. A resume takes the newest checkpoint of all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ignite_engine.checkpoint import layout
from ignite_engine.checkpoint.lock import in_use
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.store import CheckpointStore, Loaded, said_to_be_skipped
from ignite_engine.errors import CheckpointError, by_name
from ignite_engine.ranks import agreement

if TYPE_CHECKING:
    from ignite_engine.checkpoint.part_names import SaveFilter
    from ignite_engine.checkpoint.save_options import SaveOptions

logger = logging.getLogger(__name__)

TIERS = {
    "memory": "ignite_engine.ext.recovery.memory:MemoryTier",
    "mirror": "ignite_engine.ext.mirror.tier:MirrorTier",
}
"""By keyword of ``Checkpoint``: ``Checkpoint(..., NAME=value)`` makes ``TIER(value, run)``."""


class SavedRun(Protocol):
    """What a tier knows of the run: where and how it is saved, and the content of a checkpoint made now."""

    store: CheckpointStore
    options: SaveOptions
    filter: SaveFilter
    run_id: str | None
    parent: str | None

    def parts(self, trainer: Any) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, list[str]]]:
        """The shared parts, this rank's own parts, and the names that are left out."""

    def metrics_of(self, trainer: Any) -> Mapping[str, float] | None:
        """The metrics of this step boundary."""


class Offer(NamedTuple):
    """The checkpoints in a tier, the same on all ranks; and name and reason of those that cannot be read."""

    checkpoints: Sequence[CheckpointInfo]
    damaged: Sequence[tuple[Path, str]] = ()


@dataclass(frozen=True)
class Fetched:
    """A checkpoint that every rank can load.

    Attributes:
        load: ``load(rank, mmap=, whole=, shared=)``, as that of :class:`CheckpointStore`.
        place: the place where it was found, in words.
        is_committed: whether it is in the run's folder.
    """

    info: CheckpointInfo
    load: Callable[..., Loaded]
    place: str
    is_committed: bool = True


class Unreachable(Exception):
    """A tier does not answer or denies access; the message is one line."""


class Tier:
    """A second place of a run's checkpoints. Its methods are collectives; the default ones do nothing.

    Args:
        value: of the keyword argument of ``Checkpoint``.
        run: describes the run that is saved.

    Raises:
        TypeError, ValueError: one line about ``value``.
    """

    def __init__(self, value: Any, run: SavedRun) -> None:
        """Store the settings; has no other effect."""

    def attach(self, trainer: Any) -> None:
        """Add event handlers, after those of the checkpoint handler."""

    def candidates(self) -> Offer:
        """The checkpoints that a resume may use; raises Unreachable if that cannot be known."""
        return Offer([])

    def fetch(self, candidate: CheckpointInfo, folder: Folder) -> Fetched:
        """Read and verify one of them; raises CheckpointError if it is damaged, Unreachable if it cannot be read."""
        raise NotImplementedError

    def push(self, checkpoint: Path) -> None:
        """Store a checkpoint that was committed or resumed, without waiting for the end of the transfer."""

    def begin(self, trainer: Any) -> None:
        """Called when a run begins, after it has taken its folder."""

    def end(self, trainer: Any) -> None:
        """Called when a run ends or rolls back, before it releases its folder."""


class Folder(Tier):
    """The run's own folder.

    Args:
        keep: keep the parts that rank 0 loads in memory when they are verified, so that they are read once.
    """

    def __init__(self, store: CheckpointStore, *, keep: bool = False) -> None:
        self.store, self._keep = store, keep

    def __str__(self) -> str:
        return str(self.store.directory)

    def candidates(self) -> Offer:
        return Offer(*agreement.on_rank_0(lambda: layout.scan(self.store.directory)))

    def fetch(self, candidate: CheckpointInfo, folder: Folder) -> Fetched:
        def verify() -> list[str]:
            with in_use(candidate.path):
                return self.store.verify(candidate, keep=self._keep)

        if problems := agreement.on_rank_0(verify):
            raise CheckpointError("; ".join(problems))
        return Fetched(candidate, partial(self.store.load, candidate.path), str(candidate.path))


def order(checkpoint: CheckpointInfo) -> tuple[int, int, int]:
    """A sort key for the order in which the checkpoints of one run were saved."""
    return checkpoint.manifest.sequence, checkpoint.iteration, checkpoint.manifest.epoch


def newest(folder: Folder, others: Iterable[Tier] = (), *, healthy_only: bool = False) -> Fetched | None:
    """The newest checkpoint of all tiers that every rank can load; a collective. None: there is none at all.

    Args:
        others: tiers beside the folder, which is preferred among equal checkpoints.
        healthy_only: skip checkpoints with non-finite weights.

    Raises:
        CheckpointError: there are checkpoints and none is valid, or a tier is unreachable: starting over would lose
            them.
    """
    tiers = (folder, *others)
    offered: list[tuple[tuple[int, ...], Tier, CheckpointInfo]] = []
    skipped: list[tuple[int, Path, str]] = []
    unreachable: dict[Tier, str] = {}
    for place, tier in enumerate(tiers):
        try:
            offer = tier.candidates()
        except Unreachable as error:
            unreachable[tier] = str(error)
            continue
        offered += [((*order(info), -place), tier, info) for info in offer.checkpoints]
        skipped += [(layout.named_iteration(path) or 0, path, reason) for path, reason in offer.damaged]
    found = None
    for _, tier, info in sorted(offered, key=lambda each: each[0], reverse=True):
        if tier in unreachable:
            continue
        try:
            if healthy_only and not info.manifest.healthy:
                raise CheckpointError("its weights are not finite")
            found = tier.fetch(info, folder)
            break
        except Unreachable as error:
            unreachable[tier] = str(error)
        except CheckpointError as error:
            skipped.append((info.iteration, info.path, str(error)))
    if found is None and not healthy_only:
        _refuse_to_start_over(tiers, [each[1:] for each in skipped], unreachable)
    if agreement.rank() == 0:
        reached = -1 if found is None else found.info.iteration
        said_to_be_skipped([(path, reason) for iteration, path, reason in skipped if iteration > reached])
        for tier, reason in unreachable.items():
            logger.warning("%s cannot be read: %s: the run resumes from what %s holds.", tier, reason, folder)
    return found


def _refuse_to_start_over(
    tiers: Sequence[Tier], skipped: Sequence[tuple[Path, str]], unreachable: Mapping[Tier, str]
) -> None:
    for tier, reason in unreachable.items():
        raise CheckpointError(
            f"{tier} cannot be read: {reason}; {tiers[0]} holds no valid checkpoint, so the run would start over. Try "
            "again, or leave that place out to start over."
        )
    if skipped:
        path, reason = skipped[0]
        raise CheckpointError(
            f"None of the {len(skipped)} checkpoints in {' and '.join(map(str, tiers))} is valid ({path.name}: "
            f"{reason.rstrip('.')}): bring one back, or move the folder away to start over."
        )


def marker(name: str) -> str:
    """The name of a tier's marker file in a folder of checkpoints; a run without the tier removes it."""
    return f".{name}"


def tiers_of(values: Mapping[str, Any], run: SavedRun) -> dict[str, Tier]:
    """Make the tiers for keyword arguments of ``Checkpoint``, by name; the value None makes none.

    Raises:
        TypeError: the value is of another type.
        ValueError: no tier has this name, or it is not installed, or the value is out of range.
    """
    return {name: by_name("the option", name, TIERS)(value, run) for name, value in values.items() if value is not None}
