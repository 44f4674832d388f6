"""Fetches a checkpoint of a mirror into a folder: into a temporary one, verified by its hashes, then renamed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ignite_engine.checkpoint import filesystem, layout
from ignite_engine.checkpoint.manifest import MANIFEST_NAME, Manifest
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.states.tiers import Unreachable
from ignite_engine.checkpoint.verification import Verification
from ignite_engine.ext.mirror.remote import Remote, Torn, why
from ignite_engine.ranks import agreement
from ignite_engine.text import in_units

logger = logging.getLogger(__name__)
T = TypeVar("T")


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


def asked(remote: Remote, question: Callable[[], T]) -> T:
    """What rank 0 is answered, on all ranks; a collective.

    Raises:
        Unreachable: one line, the same on all ranks.
    """
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
