"""The places of a run's checkpoints: its folder, and those that TIERS names. A resume takes the newest of all."""

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
"""By the keyword of ``Checkpoint`` that asks for it: ``Checkpoint(..., NAME=value)`` makes ``TIER(value, run)``."""


class SavedRun(Protocol):
    """What a tier is told of the run: where and how it is saved, and what a checkpoint of its Trainer holds now."""

    store: CheckpointStore
    options: SaveOptions
    filter: SaveFilter
    run_id: str | None
    parent: str | None

    def parts(self, trainer: Any) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, list[str]]]:
        """Shared parts, this rank's own, and names that are left out."""

    def metrics_of(self, trainer: Any) -> Mapping[str, float] | None:
        """What was measured at this step boundary."""


class Offer(NamedTuple):
    """What a tier holds, the same on all ranks: checkpoints, and name and reason of what cannot be read."""

    checkpoints: Sequence[CheckpointInfo]
    damaged: Sequence[tuple[Path, str]] = ()


@dataclass(frozen=True)
class Fetched:
    """A checkpoint that every rank can load.

    Attributes:
        load: ``load(rank, mmap=, whole=, shared=)``, as that of :class:`CheckpointStore`.
        place: where it came from, in words.
        is_committed: it lies in the run's folder.
    """

    info: CheckpointInfo
    load: Callable[..., Loaded]
    place: str
    is_committed: bool = True


class Unreachable(Exception):
    """A tier does not answer, or does not let us in; the message is one line."""


class Tier:
    """A second place of the checkpoints of a Trainer. Its methods are collectives; these do nothing.

    Args:
        value: of the keyword that asks for it.
        run: what is saved; what a checkpoint is to hold.

    Raises:
        TypeError, ValueError: one line about ``value``.
    """

    def __init__(self, value: Any, run: SavedRun) -> None:
        """Store the settings and touch nothing."""

    def attach(self, trainer: Any) -> None:
        """Listen to the run, after the checkpoint handler does."""

    def candidates(self) -> Offer:
        """What a resume may take; Unreachable: it is not to be known."""
        return Offer([])

    def fetch(self, candidate: CheckpointInfo, folder: Folder) -> Fetched:
        """One of them, read and verified; CheckpointError: it is damaged, Unreachable: it is not to be had."""
        raise NotImplementedError

    def push(self, checkpoint: Path) -> None:
        """Take a checkpoint that was committed, or resumed; it does not wait for it."""

    def begin(self, trainer: Any) -> None:
        """A run begins, and holds its folder."""

    def end(self, trainer: Any) -> None:
        """A run is over, or is left to go back to a checkpoint; it still holds its folder."""


class Folder(Tier):
    """The run's own folder.

    Args:
        keep: hold what rank 0 loads of a checkpoint in memory when it is verified, so that it is read once.
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
    """A sort key: the order in which the checkpoints of one run were saved."""
    return checkpoint.manifest.sequence, checkpoint.iteration, checkpoint.manifest.epoch


def newest(folder: Folder, others: Iterable[Tier] = (), *, healthy_only: bool = False) -> Fetched | None:
    """The newest checkpoint of all tiers that every rank can load; a collective. None: there is none at all.

    Args:
        others: of equal ones that of the folder is taken.
        healthy_only: skip those with weights that are not finite.

    Raises:
        CheckpointError: there are some and none is valid, or it cannot be known: to start over would lose them.
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
    """The name of a file by which a tier finds again what it keeps for a folder; a run without the tier removes it."""
    return f".{name}"


def tiers_of(values: Mapping[str, Any], run: SavedRun) -> dict[str, Tier]:
    """The tiers that keywords ask for, by name; None asks for none.

    Raises:
        TypeError: the value is of another type.
        ValueError: no tier has this name, or it is not installed, or the value is out of range.
    """
    return {name: by_name("the option", name, TIERS)(value, run) for name, value in values.items() if value is not None}
