"""Fetches checkpoints of a mirror into a folder: into a temporary one, verified by their hashes, then renamed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ignite_engine.checkpointing import filesystem, layout
from ignite_engine.checkpointing.manifest import MANIFEST_NAME, Manifest
from ignite_engine.checkpointing.retention import CheckpointInfo, Retention
from ignite_engine.checkpointing.verification import Verification
from ignite_engine.errors import CheckpointError
from ignite_engine.ext.mirror.remote import Remote, Torn, order, why
from ignite_engine.ranks import agreement
from ignite_engine.text import in_units

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Unreachable(Exception):
    """A mirror does not answer, or does not let us in; the message is one line."""


def bring(remote: Remote, directory: Path, retention: Retention) -> None:
    """Fetch the newest valid checkpoint of a mirror into a folder, if it is newer than what is valid there.

    A collective.

    Args:
        retention: those that it keeps as the best of the run are fetched with it.

    Raises:
        CheckpointError: one line, the same on all ranks; the folder holds no checkpoint, and the mirror cannot be read,
            or holds none that is valid: to start over would lose what is there.
    """
    skipped: list[tuple[str, str]] = []
    problem = ""
    try:
        there, unreadable = _asked(remote, remote.checkpoints)
        newer, best = agreement.on_rank_0(lambda: _wanted(there, directory, retention))
        skipped += unreadable if newer or not there else []

        def is_fetched(checkpoint: CheckpointInfo) -> bool:
            try:
                fetch(remote, directory, checkpoint)
            except Torn as torn:
                skipped.append((checkpoint.path.name, str(torn)))
                return False
            return True

        for checkpoint in best:  # first: once the newest is here, nothing is fetched any more
            is_fetched(checkpoint)
        any(map(is_fetched, newer))
    except Unreachable as reason:
        problem = f"{remote.url} cannot be read: {reason}"
    agreement.on_rank_0(lambda: _go_on(remote, directory, skipped, problem))


def check_new(remote: Remote) -> None:
    """Refuse a mirror that holds checkpoints; a collective.

    Raises:
        CheckpointError: one line; it does, or cannot be read.
    """
    try:
        names = _asked(remote, remote.names)
    except Unreachable as reason:
        raise CheckpointError(f"{remote.url} cannot be read: {reason}.") from None
    if names:
        raise CheckpointError(
            f"{remote.url} holds {names[-1]}, but must_be_new was given: give another mirror, or leave must_be_new out "
            "to resume."
        )


def fetch(remote: Remote, directory: Path, checkpoint: CheckpointInfo) -> Path:
    """Fetch a checkpoint; a collective, in which each rank fetches its share of the files.

    Returns:
        Where it is now.

    Raises:
        Torn, Unreachable: one line, the same on all ranks.
    """
    began, name, manifest = time.perf_counter(), checkpoint.path.name, checkpoint.manifest
    size = in_units(sum(record.bytes for record in manifest.files.values()))
    mine = [file for i, file in enumerate(manifest.files) if i % agreement.world_size() == agreement.rank()]
    folder = layout.temporary_path(directory, manifest.iteration)
    folder = agreement.broadcast_object(folder)
    agreement.on_rank_0(lambda: filesystem.ensure_directory(folder))
    if agreement.rank() == 0:
        logger.info("Fetching %s from %s: %s.", name, remote.url, size)

    def get() -> None:
        for file in mine:
            remote.get(f"{name}/{file}", folder / file, manifest.files[file])

    try:
        _together(remote, get)
    except BaseException:
        agreement.on_rank_0(lambda: filesystem.remove_tree(folder))
        raise
    committed = agreement.on_rank_0(lambda: _commit(folder, directory / name, manifest))
    if agreement.rank() == 0:
        seconds = time.perf_counter() - began
        logger.warning("Fetched %s from %s: %s in %.3g s.", name, remote.url, size, seconds)
    return committed


def _wanted(
    there: Sequence[CheckpointInfo], directory: Path, retention: Retention
) -> tuple[list[CheckpointInfo], list[CheckpointInfo]]:
    """Those of a mirror that are newer than what is here, the newest first, and the best that are not here."""
    newer = _newer(there, directory)
    if not newer:
        return [], []
    of_run = [checkpoint for checkpoint in there if checkpoint.manifest.run_id == newer[0].manifest.run_id]
    here = {checkpoint.path.name for checkpoint in layout.scan(directory)[0]} | {newer[0].path.name}
    return newer, [checkpoint for checkpoint in retention.best_of(of_run) if checkpoint.path.name not in here]


def _newer(there: Sequence[CheckpointInfo], directory: Path) -> list[CheckpointInfo]:
    """Those that would be resumed rather than what is valid here.

    Only those of the run that saved the newest one here count; in a folder without one, those of the run that has
    saved there last.
    """
    verification = Verification()
    for local in reversed(layout.scan(directory)[0]):
        newer = [
            checkpoint
            for checkpoint in there
            if checkpoint.manifest.run_id == local.manifest.run_id and order(checkpoint) > order(local)
        ]
        if newer:
            return newer[::-1]
        if not verification.problems(local.path, local.manifest):
            return []
    last = max(there, key=lambda checkpoint: checkpoint.manifest.created_at, default=None)
    if last is None:
        return []
    return [checkpoint for checkpoint in reversed(there) if checkpoint.manifest.run_id == last.manifest.run_id]


def _commit(folder: Path, committed: Path, manifest: Manifest) -> Path:
    """Give a fetched checkpoint its name; a damaged one that has it goes."""
    filesystem.write_file(folder / MANIFEST_NAME, lambda file: file.write(manifest.to_json()))
    filesystem.synchronise_directory(folder)
    if committed.exists() and Verification().problems(committed):
        layout.discard([committed])
    if os.path.lexists(committed):
        committed = layout.free_name(committed.parent, manifest.iteration)
    filesystem.rename(folder, committed)
    filesystem.synchronise_directory(committed.parent)
    return committed


def _go_on(remote: Remote, directory: Path, skipped: Sequence[tuple[str, str]], problem: str) -> None:
    """Name what was not fetched, and go on with what the folder holds.

    Raises:
        CheckpointError: it holds nothing.
    """
    holds_any = any(layout.scan(directory))
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


def _asked(remote: Remote, question: Callable[[], T]) -> T:
    """What rank 0 is answered, on all ranks; a collective."""
    answers = _together(remote, lambda: [question()] if agreement.rank() == 0 else [])
    return answers[0][0]


def _together(remote: Remote, function: Callable[[], T]) -> list[T]:
    """Call a function that waits for a store on every rank; a collective, in which no exchange waits for the store.

    It is called in a thread that ends with the process, and is left behind where the store is silent.

    Returns:
        The (picklable) results of all ranks.

    Raises:
        Torn, Unreachable: one line, the same on all ranks.
    """
    results: list[T] = []
    torn: list[str] = []
    failures: list[str] = []

    def call() -> None:
        try:
            results.append(function())
        except Torn as problem:
            torn.append(str(problem))
        except BaseException as error:  # a store may raise anything
            failures.append(why(error))

    remote.moved_at = time.monotonic()
    thread = threading.Thread(target=call, name="mirror", daemon=True)
    thread.start()
    while True:
        thread.join(1.0)
        if all(agreement.gather_objects(not thread.is_alive() or remote.is_silent)):
            break
    if not (results or torn or failures):
        failures.append("it has been silent for long")
    ranks = agreement.gather_objects((results, torn, failures))
    for reason in (reason for _, _, failed in ranks for reason in failed):
        raise Unreachable(reason)
    for reason in (reason for _, found, _ in ranks for reason in found):
        raise Torn(reason)
    return [result for found, _, _ in ranks for result in found]
