"""Fetches a checkpoint from a mirror: into a temporary folder, which is verified and renamed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ignite_engine.checkpoint import filesystem, layout
from ignite_engine.checkpoint.manifest import MANIFEST_NAME
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.states.tiers import Unreachable
from ignite_engine.checkpoint.verification import problems_of
from ignite_engine.ext.mirror.remote import Remote, Torn, why
from ignite_engine.ranks import agreement
from ignite_engine.text import in_units

logger = logging.getLogger(__name__)
T = TypeVar("T")


def fetch(remote: Remote, directory: Path, checkpoint: CheckpointInfo) -> Path:
    """Fetch a checkpoint if it is not there yet; a collective, in which each rank fetches some of the files.

    Returns:
        The path of the checkpoint.

    Raises:
        Torn, Unreachable: one line, the same on all ranks.
    """
    began, name, manifest = time.perf_counter(), checkpoint.path.name, checkpoint.manifest
    size = in_units(sum(record.bytes for record in manifest.files.values()))

    def begin() -> Path | None:
        if not problems_of(directory / name, manifest):
            return None
        logger.info("Fetching %s from %s: %s.", name, remote.url, size)
        folder = layout.temporary_path(directory, manifest.iteration)
        filesystem.ensure_directory(folder)
        return folder

    def get() -> None:
        for number, (file, record) in enumerate(manifest.files.items()):
            if number % agreement.world_size() == agreement.rank():
                remote.get(f"{name}/{file}", temporary / file, record)

    def commit() -> Path:
        """Rename it to its committed name; a damaged checkpoint of that name is deleted."""
        committed = directory / name
        filesystem.write_file(temporary / MANIFEST_NAME, lambda file: file.write(manifest.to_json()))
        filesystem.synchronise_directory(temporary)
        if committed.exists() and problems_of(committed):
            layout.discard([committed])
        if os.path.lexists(committed):
            committed = layout.free_name(directory, manifest.iteration)
        filesystem.rename(temporary, committed)
        filesystem.synchronise_directory(directory)
        logger.warning("Fetched %s from %s: %s in %.3g s.", name, remote.url, size, time.perf_counter() - began)
        return committed

    if (folder := agreement.on_rank_0(begin)) is None:
        return directory / name
    temporary = folder
    try:
        together(remote, get)
    except BaseException:
        agreement.on_rank_0(lambda: filesystem.remove_tree(temporary))
        raise
    return agreement.on_rank_0(commit)


def together(remote: Remote, function: Callable[[], T]) -> list[T]:
    """Call a function that waits for a store on every rank; a collective that itself never waits for the store.

    It is called in a daemon thread, which is abandoned if the store is silent.

    Returns:
        The (picklable) results of all ranks.

    Raises:
        Torn, Unreachable: one line, the same on all ranks.
    """
    outcomes: list[T | Exception] = []

    def call() -> None:
        try:
            outcomes.append(function())
        except Torn as problem:
            outcomes.append(problem)
        except BaseException as error:  # a store may raise anything
            outcomes.append(Unreachable(why(error)))

    remote.moved_at = time.monotonic()
    thread = threading.Thread(target=call, name="mirror", daemon=True)
    thread.start()
    while True:
        thread.join(1.0)
        if all(agreement.gather_objects(not thread.is_alive() or remote.is_silent)):
            break
    of_ranks = agreement.gather_objects([*outcomes, Unreachable("it has been silent for long")][0])
    for kind in (Unreachable, Torn):
        for error in of_ranks:
            if isinstance(error, kind):
                raise error
    return [result for result in of_ranks if not isinstance(result, Exception)]
