"""One save, step by step: the order of these steps is what makes a kill at any moment harmless.

1. rank 0 makes a temporary directory and holds its lock
2. every rank writes and fsyncs its files into it
3. rank 0 fsyncs the directory, writes and fsyncs the manifest, fsyncs the directory again
4. rank 0 renames the directory to its committed name and fsyncs the parent
5. only then an older checkpoint of the same iteration goes
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ignite_engine.checkpoint import filesystem
from ignite_engine.checkpoint import layout as names
from ignite_engine.checkpoint.environment import environment_values
from ignite_engine.checkpoint.filesystem import FileRecord, in_threads, write_file
from ignite_engine.checkpoint.lock import unused
from ignite_engine.checkpoint.manifest import (
    Facts,
    Manifest,
    current_versions,
    plain_config,
    plain_metrics,
)
from ignite_engine.checkpoint.nested import is_made_of_tensors, taken_apart, walk
from ignite_engine.checkpoint.pack import Pack
from ignite_engine.checkpoint.retention import superseded
from ignite_engine.checkpoint.shards import PIECES, Shards, without_shards
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)
Parts = Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """What one rank reports about the files that it has written."""

    iteration: int
    files: dict[str, FileRecord]
    parts: dict[str, list[str]]
    reproducibility: list[str]
    healthy: bool
    missing: dict[str, int]
    """By part, a count of missing elements; it sums to zero over all ranks if their pieces cover the part."""
    sharding: list[str]


def remove_if_there(path: Path) -> None:
    """Remove the temporary directory of a failed save; after a successful one it is not there."""
    # the error that ended the save is the one to report; what cannot be removed now is swept later
    with contextlib.suppress(OSError):
        filesystem.remove_tree(path)


def write_files(
    temporary: Path,
    iteration: int,
    shared: Parts,
    local: Parts,
    shards: Shards | None,
    writers: int,
    weights: Collection[str],
    facts: Facts,
) -> Written:
    """Write this rank's files: rank 0 the shared parts, each rank its own with its pieces of sharded tensors.

    See ``CheckpointStore.save`` for the arguments.
    """
    if shards is None:
        shared, local, shards = without_shards(shared, local)
    rank = agreement.rank()
    tensors = {part: _tensors_in(state) for part, state in {**shared, **local}.items()}
    pieces = local.get(PIECES, {})
    values = [value for part in weights for value in tensors.get(part, ()) if not value.is_meta]
    values += [values for part in weights for _, values in pieces.get(part, {}).values()]
    files: dict[str, dict[str, Any]] = {}
    sizes = {part: sum(value.numel() * value.element_size() for value in tensors[part]) for part in shared}
    file_of = _file_of_parts(sizes, writers)
    for part, state in shared.items() if rank == 0 else ():
        files.setdefault(file_of[part], {})[part] = state
    if local:
        files[names.rank_file(rank)] = dict(local)
    packs = {name: Pack(parts) for name, parts in files.items()}  # refuses what cannot be loaded again
    healthy = all(map(is_finite, values))
    records = in_threads(
        lambda name: write_file(temporary / name, lambda file: file.writelines(packs[name].blocks())), packs, writers
    )
    return Written(
        iteration=iteration,
        files=dict(zip(files, records, strict=True)),
        parts={name: list(parts) for name, parts in files.items()},
        reproducibility=list(facts.get("reproducibility", ())),
        healthy=facts.get("healthy", True) and healthy,
        missing=shards.missing(rank, pieces),
        sharding=list(shards.layout),
    )


def is_finite(value: Tensor) -> bool:
    """Whether all elements of a tensor are finite; of a sharded tensor, this rank's piece. Makes no copy."""
    if is_made_of_tensors(value):
        return all(map(is_finite, taken_apart(value)[0].values()))
    value = value.detach()
    if hasattr(value, "to_local"):
        value = value.to_local()
    if value.layout != torch.strided:
        value = value.coalesce().values() if value.layout == torch.sparse_coo else value.values()
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return True
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.element_size() == 1:
        value = value.float()  # the 8-bit formats have no aminmax
    smallest, largest = torch.aminmax(value)
    return bool(torch.isfinite(smallest)) and bool(torch.isfinite(largest))


def _tensors_in(state: Any) -> list[Tensor]:
    return [value for _, value in walk(state) if isinstance(value, Tensor)]


def _file_of_parts(sizes: Mapping[str, int], writers: int) -> dict[str, str]:
    """Assign each part to one of ``writers`` files: the largest part first, each to the smallest file so far."""
    filled = [0] * writers
    file_of: dict[str, str] = {}
    for part in sorted(sizes, key=sizes.__getitem__, reverse=True):
        number = filled.index(min(filled))
        filled[number] += sizes[part]
        file_of[part] = names.shared_file(number)
    return file_of


def replace_older(directory: Path, iteration: int, committed: Path) -> Path:
    """Delete the checkpoints that this one supersedes, and rename it to the plain name if that is free."""
    plain = directory / names.checkpoint_name(iteration)
    if committed == plain:
        return plain
    same = [checkpoint for checkpoint in names.scan(directory)[0] if checkpoint.iteration == iteration]
    try:
        with unused(checkpoint.path for checkpoint in superseded(same)) as free:
            names.discard(sorted(free))
    except OSError as error:  # the new one is committed
        logger.warning("A checkpoint that %s replaces cannot be deleted: %s.", committed, one_line(error))
    # the plain name still belongs to a healthy checkpoint, one in use, or one that cannot be read
    if os.path.lexists(plain):
        return committed
    filesystem.rename(committed, plain)
    filesystem.synchronise_directory(directory)
    return plain


def manifest_of(directory: Path, iteration: int, epoch: int, written: Sequence[Written], facts: Facts) -> Manifest:
    """The manifest of a checkpoint whose files are written."""
    iterations = sorted({rank.iteration for rank in written})
    if len(iterations) > 1:
        raise CheckpointError(f"the ranks are at different iterations: {iterations}")
    parts = _unique(part for rank in written for part in rank.missing)
    if incomplete := [part for part in parts if sum(rank.missing.get(part, 0) for rank in written)]:
        raise CheckpointError(f"the ranks do not hold the whole of {', '.join(incomplete)} together")
    earlier, unreadable = names.scan(directory)
    known = {
        "iteration": iteration,
        "epoch": epoch,
        # an unreadable checkpoint may become readable again
        "sequence": 1 + len(unreadable) + max((checkpoint.manifest.sequence for checkpoint in earlier), default=0),
        "world_size": agreement.world_size(),
        "metrics": plain_metrics(facts.get("metrics")),
        "config": plain_config(facts.get("config")),
        "versions": current_versions(),
        "files": {name: record for rank in written for name, record in rank.files.items()},
        "parts": {name: held for rank in written for name, held in rank.parts.items()},
        "created_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "reproducibility": _unique(reason for rank in written for reason in rank.reproducibility),
        "healthy": all(rank.healthy for rank in written),
        "labels": _unique(facts.get("labels", ())),
        "environment": {**environment_values(agreement.world_size()), "sharding": written[0].sharding},
    }
    return Manifest(**{**facts, **known})  # type: ignore[arg-type]  # keys and types are those of Facts


def _unique(words: Any) -> list[str]:
    return list(dict.fromkeys(str(word) for word in words))
