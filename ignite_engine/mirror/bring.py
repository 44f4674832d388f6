"""What a resume does with a mirror: the newest valid checkpoint of both places is in the folder afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from ignite_engine.checkpointing import CheckpointError
from ignite_engine.checkpointing.layout import scan
from ignite_engine.checkpointing.manifest import Manifest
from ignite_engine.checkpointing.retention import CheckpointInfo, Retention
from ignite_engine.mirror.fetch import Fetch, newer_than_local
from ignite_engine.mirror.remote import Remote, Torn
from ignite_engine.mirror.waiting import Throttle, Unreachable, together
from ignite_engine.ranks import agreement
from ignite_engine.text import in_units

logger = logging.getLogger(__name__)
ANSWERS_WITHIN_S = 60.0
"""Seconds within which a store answers a question that moves no files."""


def bring(remote: Remote, directory: Path, parallel: int = 4, retention: Retention | None = None) -> None:
    """Fetch the newest valid checkpoint of a mirror into a folder, if it is newer than what is valid there.

    A collective; each rank fetches its own files, and rank 0 commits them.

    Args:
        retention: those that it keeps as the best of the run are fetched with it.

    Raises:
        CheckpointError: one line, the same on all ranks; the folder holds no checkpoint, and the mirror cannot be read,
            or holds none that is valid: to start over would lose what is there.
    """
    skipped: list[tuple[str, str]] = []
    problem = ""
    try:
        names, best, unreadable = _candidates(remote, directory, retention)
        skipped += unreadable

        def fetch(name: str) -> bool:
            try:
                fetched = fetch_together(remote, directory, name, parallel)
            except Torn as torn:
                skipped.append((name, str(torn)))
                return False
            if fetched and agreement.rank() == 0:
                logger.warning("%s", " ".join(fetched))
            return True

        for name in best:  # first: once the newest is here, nothing is fetched any more
            fetch(name)
        any(map(fetch, names))
    except Unreachable as reason:
        problem = f"{remote.url} cannot be read: {str(reason).rstrip('.')}"
    agreement.on_rank_0(lambda: _go_on(remote, directory, skipped, problem))


def check_new(remote: Remote) -> None:
    """Refuse a mirror that holds checkpoints; a collective.

    Raises:
        CheckpointError: one line; it does, or cannot be read.
    """
    try:
        names = together(lambda _: remote.names() if agreement.rank() == 0 else [], ANSWERS_WITHIN_S)[0]
    except Unreachable as reason:
        raise CheckpointError(f"{remote.url} cannot be read: {reason}.") from None
    if names:
        raise CheckpointError(
            f"{remote.url} holds {names[-1]}, but must_be_new was given: give another mirror, or leave must_be_new out "
            "to resume."
        )


def _candidates(
    remote: Remote, directory: Path, retention: Retention | None
) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Names of the checkpoints to fetch, the newest first; of the best to fetch beside one of them, which may be among
    them; and name and reason of those whose manifest is damaged."""
    readable, unreadable = together(
        lambda _: remote.checkpoints() if agreement.rank() == 0 else ([], []), ANSWERS_WITHIN_S
    )[0]
    # by rank 0, which may have to read what is here: that is no wait for the store
    names, best = agreement.on_rank_0(lambda: _names_to_fetch(readable, directory, retention))
    holds_any = agreement.on_rank_0(lambda: any(scan(directory)))
    return names, best, [] if holds_any and not names else unreadable


def _names_to_fetch(
    there: Sequence[CheckpointInfo], directory: Path, retention: Retention | None
) -> tuple[list[str], list[str]]:
    """Names of those that are newer than what is here, the newest first, and of the best that are not here."""
    newer = newer_than_local(there, directory)
    if not newer or retention is None:
        return [checkpoint.path.name for checkpoint in newer], []
    of_run = [checkpoint for checkpoint in there if checkpoint.manifest.run_id == newer[0].manifest.run_id]
    here = {checkpoint.path.name for checkpoint in scan(directory)[0]}
    best = [checkpoint.path.name for checkpoint in retention.best_of(of_run)]
    names = [checkpoint.path.name for checkpoint in newer]
    return names, [name for name in best if name not in {*here, names[0]}]


def fetch_together(remote: Remote, directory: Path, name: str, parallel: int = 4) -> list[str]:
    """Fetch a checkpoint and those that it needs; a collective, in which each rank fetches its own files.

    Returns:
        A line about each.

    Raises:
        Torn, Unreachable: one line, the same on all ranks.
    """
    work, rank = Fetch(remote, directory, name, parallel), agreement.rank()
    began = time.perf_counter()
    todo = together(lambda _: work.missing() if rank == 0 else [])[0]
    if rank == 0:
        size = sum(record.bytes for _, manifest in todo for record in manifest.files.values())
        logger.info("Fetching %s from %s: at most %s.", name, remote.url, in_units(size))
    said = []
    for checkpoint, manifest in todo:
        moved = _fetch_one(work, checkpoint, manifest)
        seconds = time.perf_counter() - began
        said.append(f"Fetched {checkpoint} from {remote.url}: {in_units(moved)} in {seconds:.3g} s.")
    return said


def _fetch_one(work: Fetch, checkpoint: str, manifest: Manifest) -> int:
    """Returns the bytes that all ranks have received."""

    def files(moved: Throttle) -> int:
        work.files(checkpoint, manifest, moved, agreement.rank(), agreement.world_size())
        return moved.moved

    agreement.on_rank_0(lambda: work.begin(checkpoint))
    received = sum(together(files))
    agreement.on_rank_0(lambda: work.commit(checkpoint, manifest))
    return received


def _go_on(remote: Remote, directory: Path, skipped: Sequence[tuple[str, str]], problem: str) -> None:
    """Name what was not fetched, and go on with what the folder holds.

    Raises:
        CheckpointError: it holds nothing.
    """
    holds_any = any(scan(directory))
    if problem and not holds_any:
        raise CheckpointError(
            f"{problem}; {directory} holds no checkpoint, so the run would start over. Try again, or leave the mirror "
            "out to start over."
        )
    if skipped and not holds_any:
        name, reason = skipped[0]
        raise CheckpointError(
            f"None of the {len(skipped)} checkpoints in {remote.url} is valid ({name}: {reason.rstrip('.')}): "
            "bring one back, or leave the mirror out to start over."
        )
    if problem:
        logger.warning("%s: the run resumes from what %s holds.", problem, directory)
    for name, reason in skipped:
        logger.warning("Checkpoint %s in %s is skipped: %s.", name, remote.url, reason.rstrip("."))
    if not skipped and not holds_any:
        logger.warning("%s holds no checkpoint.", remote.url)
