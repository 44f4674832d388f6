"""A directory of checkpoints: commit, verify, load, prune. Knows no engine, no event and no trainer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch.distributed as dist

from ignite_engine.checkpoint import filesystem, verification
from ignite_engine.checkpoint import layout as names
from ignite_engine.checkpoint.commit import Written, manifest_of, remove_if_there, replace_older, write_files
from ignite_engine.checkpoint.contents import joined
from ignite_engine.checkpoint.lock import LOOKS, in_use, lock, one_writer, unused
from ignite_engine.checkpoint.manifest import MANIFEST_NAME, Facts, Manifest, plain_config, plain_metrics, read_manifest
from ignite_engine.checkpoint.retention import CheckpointInfo, Retention, of_one_run, ranked
from ignite_engine.checkpoint.shards import Shards
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)


class Newest(NamedTuple):
    """The newest valid checkpoint, and path and reason of each newer one that was skipped."""

    checkpoint: CheckpointInfo | None
    skipped: list[tuple[Path, str]]


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint, tensors on the CPU."""

    path: Path
    manifest: Manifest
    shared: dict[str, Any]
    local: dict[str, Any]
    """Empty for a rank that did not exist when it was saved."""


class CheckpointStore:
    """Checkpoints in one directory, each a directory ``iteration_00000500`` that is either complete or absent.

    Args:
        directory: made at the first save.
        group: a CPU (gloo) group of all ranks, needed to save in another thread; None: the main thread saves.

    ``save``, ``add_metrics`` and ``sweep`` are collectives: all ranks call them in the same order and get the
    same result or the same ``CheckpointError``. All other methods act in the calling process alone.
    """

    def __init__(self, directory: str | Path, group: dist.ProcessGroup | None = None) -> None:
        self.directory = Path(directory)
        self._group = group
        self._kept: verification.Kept = {}
        self.last_saved: Manifest | None = None
        """The manifest of the last save of this store."""

    def save(
        self,
        shared: Mapping[str, Any],
        local: Mapping[str, Any],
        *,
        iteration: int,
        epoch: int,
        shards: Shards | None = None,
        writers: int = 1,
        weights: Collection[str] = (),
        wait: Callable[[], None] = lambda: None,
        **facts: Unpack[Facts],
    ) -> Path:
        """Write a checkpoint and commit it; a collective. Older ones stay as they are.

        A checkpoint saved again at the same iteration replaces the previous one, which
        is deleted only after the new one is committed.

        Args:
            shared: named parts that are the same on all ranks; rank 0 writes them.
            local: named parts of this rank.
            iteration: updates done; the same on all ranks.
            epoch: as the caller counts.
            shards: from ``without_shards``, if the caller has replaced sharded tensors already.
            writers: number of threads, and of files for the shared parts.
            weights: names of the parts that must be finite in a healthy checkpoint.
            wait: called before a value is read; returns when all copies are complete.
            facts: of the manifest: ``metrics`` (numbers to choose the best by), ``config`` (JSON data), ``labels``,
                ``parent`` (the one that this run saved before, or was resumed from), ``left_out`` (names inside parts
                that were left out of them, by part) and ``kinds`` (what each part is), of which rank 0's count;
                ``reproducibility`` (reasons why a resumed run may differ in its bits), joined over the ranks; and
                ``healthy`` (this rank's weights are finite), True if it is on all ranks.

        Returns:
            The committed directory.

        Raises:
            CheckpointError: nothing was committed, earlier checkpoints are untouched; the same on all ranks.
            ValueError: ``iteration`` is negative.
        """
        if iteration < 0:
            raise ValueError(f"iteration must be at least 0, got {iteration}.")

        directory, how = self.directory, self._failing_as(partial(self._not_saved, iteration))
        with contextlib.ExitStack() as on_exit:

            def begin() -> Path:
                plain_metrics(facts.get("metrics"))  # refused before anything is written
                plain_config(facts.get("config"))
                filesystem.ensure_directory(directory)
                path = names.temporary_path(directory, iteration)
                # registered before it is made: an interrupt in between must not leave it behind
                on_exit.callback(remove_if_there, path)
                filesystem.make_directory(path)
                on_exit.enter_context(lock(path))
                return path

            temporary = agreement.on_rank_0(begin, **how)

            def write() -> Written:
                wait()  # within the collective: a failure on one rank fails the save on all
                return write_files(temporary, iteration, shared, local, shards, writers, weights, facts)

            written = agreement.agreed(write, **how)

            def finish() -> tuple[Path, Manifest]:
                manifest = manifest_of(directory, iteration, epoch, written, facts)
                filesystem.synchronise_directory(temporary)
                filesystem.write_file(temporary / MANIFEST_NAME, lambda file: file.write(manifest.to_json()))
                filesystem.synchronise_directory(temporary)
                committed = names.free_name(directory, iteration)
                filesystem.rename(temporary, committed)
                filesystem.synchronise_directory(directory)
                return replace_older(directory, iteration, committed), manifest

            path, manifest = agreement.on_rank_0(finish, **how)
        self.last_saved = manifest
        verification.remember_written(path, manifest)
        return path

    def checkpoints(self) -> list[CheckpointInfo]:
        """The committed checkpoints with a readable manifest, in the order they were saved.

        This is the order of iterations, unless a run was resumed from an older checkpoint beside newer ones.
        """
        return names.scan(self.directory)[0]

    def latest(self) -> Newest:
        """The newest valid checkpoint; all of its files are read and verified. Not a collective: call it on one rank.

        Returns:
            The checkpoint, or None; and the newer ones that were skipped with the reasons, which are also logged as
            warnings.
        """
        unreadable: list[tuple[Path, str]] = []

        def look() -> Iterable[CheckpointInfo]:
            readable, unreadable[:] = names.scan(self.directory)
            return reversed(readable)

        found, skipped = self._first_valid(look)
        for path, reason in unreadable:
            if found is None or (names.named_iteration(path) or 0) > found.iteration:
                skipped.append((path, reason))
        return Newest(found, said_to_be_skipped(skipped))

    def best(self, metric: str, mode: str, *, among: Sequence[CheckpointInfo] | None = None) -> CheckpointInfo | None:
        """The best valid checkpoint; a damaged one is skipped with a warning. Not a collective: call it on one rank.

        Args:
            metric: a name in the manifests. A checkpoint without a finite value, or with non-finite weights, is not
                considered.
            mode: ``min`` or ``max``: whether a small or a large value is good.
            among: the candidates; None: those of the run that saved the newest one.
        """
        found, skipped = self._first_valid(
            lambda: ranked(of_one_run(self.checkpoints()) if among is None else among, metric, mode)
        )
        said_to_be_skipped(skipped)
        return found

    def verify(self, checkpoint: str | Path | CheckpointInfo, *, keep: bool = False) -> list[str]:
        """Read a whole checkpoint and return a list of what is wrong with it; empty if it is valid.

        Args:
            checkpoint: its path; or its info, if the manifest was just read.
            keep: keep the parts that rank 0 loads in memory for the next :meth:`load`, so that they are read once.
        """
        if not isinstance(checkpoint, CheckpointInfo):
            return verification.problems_of(Path(checkpoint))
        self._kept.clear()
        kept = _files_of(checkpoint.manifest, 0) if keep else ()
        return verification.problems_of(checkpoint.path, checkpoint.manifest, keep=self._kept, kept=tuple(kept))

    def load(
        self, path: str | Path, rank: int = 0, *, mmap: bool = False, whole: bool = True, shared: bool = True
    ) -> Loaded:
        """Load the shared parts and those of one rank; each file is verified before it is used.

        Args:
            path: a committed checkpoint, of this store or another.
            rank: the rank whose local parts are loaded.
            mmap: see ``pack.map_pack``; for looking into large files, not for training.
            whole: tensors that are sharded over ranks are read whole; False: they are
                :class:`~ignite_engine.checkpoint.shards.Sharded`, read when they are needed.
            shared: False: the shared parts are not read, and are empty.

        Raises:
            CheckpointError: one line; missing, damaged, not readable by this release, or not plain data.
        """
        path = Path(path)
        manifest = names.manifest_of(path)
        merged: dict[str, Any] = {}
        local: dict[str, Any] = {}
        for name in _files_of(manifest, rank, shared=shared):
            parts = verification.read_parts(path / name, manifest.files[name], self._kept, mapped=mmap)
            (local if name == names.rank_file(rank) else merged).update(parts)
        merged, local = joined(path, manifest, merged, local, whole=whole)
        return Loaded(path, manifest, merged, local)

    def prune(self, retention: Retention) -> list[Path]:
        """Delete what ``retention`` does not keep. Not a collective: call it on one rank, after a save.

        Damaged checkpoints are neither counted nor deleted; those in use are left to the next call. Nothing is deleted
        before one of the kept checkpoints is known to be valid (a healthy one, if there is any); files that were hashed
        while they were written are not read again.

        Returns:
            The paths of the deleted checkpoints.

        Raises:
            CheckpointError: one could not be deleted.
        """
        try:
            to_delete = self.to_delete(retention)
            with unused(checkpoint.path for checkpoint in to_delete) as free:
                gone = [checkpoint.path for checkpoint in to_delete if checkpoint.path in free]
                if gone:
                    names.discard(gone)
        except Exception as error:
            raise CheckpointError(f"Pruning failed: {one_line(error)}.") from error
        for path in gone:
            verification.forget(path)
        return gone

    def add_metrics(self, path: str | Path, metrics: Mapping[str, Any]) -> Manifest:
        """Add metrics to a manifest; a collective. Other processes may do the same concurrently.

        Args:
            path: a committed checkpoint.
            metrics: numbers by name.

        Returns:
            The new manifest.

        Raises:
            CheckpointError: the manifest could not be read or written; the old one is unchanged.
        """
        how = self._failing_as(lambda causes: f"{path} was not changed: {causes}.")
        return agreement.on_rank_0(lambda: _with_metrics(Path(path), metrics), **how)

    def sweep(self) -> list[Path]:
        """Remove what dead writers have left; a collective, for the start of a run. Files of living writers stay."""
        how = self._failing_as(lambda causes: f"Sweeping failed: {causes}.")
        return agreement.on_rank_0(lambda: names.sweep(self.directory), **how)

    def _failing_as(self, text_of: Callable[[str], str]) -> dict[str, Any]:
        """Arguments for collective calls: a failure on one rank is raised on all, with this text."""
        return {"group": self._group, "failed": lambda causes: CheckpointError(text_of(causes))}

    def to_delete(self, retention: Retention) -> list[CheckpointInfo]:
        """The checkpoints that :meth:`prune` would delete; files may be read to verify them."""
        sound = [each for each in self.checkpoints() if verification.looks_sound(each.path, each.manifest)]
        kept = retention.kept(sound)
        staying_paths = {checkpoint.path for checkpoint in kept}
        to_delete = [checkpoint for checkpoint in sound if checkpoint.path not in staying_paths]
        if not to_delete:
            return []
        # the last valid checkpoint and the last valid healthy one must be kept
        for candidates in ([checkpoint for checkpoint in sound if checkpoint.manifest.healthy], sound):
            staying = [checkpoint for checkpoint in candidates if checkpoint not in to_delete]
            if any(verification.is_valid(each.path, each.manifest) for each in reversed(staying)):
                continue
            leaving = (checkpoint for checkpoint in reversed(candidates) if checkpoint in to_delete)
            kept_valid = next((each for each in leaving if verification.is_valid(each.path, each.manifest)), None)
            to_delete = [checkpoint for checkpoint in to_delete if checkpoint is not kept_valid]
        return to_delete

    def _first_valid(
        self, look: Callable[[], Iterable[CheckpointInfo]]
    ) -> tuple[CheckpointInfo | None, list[tuple[Path, str]]]:
        """The first valid checkpoint that ``look`` returns, and path and problem of those before it.

        If one of them was deleted meanwhile, by a run that prunes, it looks again.
        """
        for looks_left in reversed(range(LOOKS)):
            skipped: list[tuple[Path, str]] = []
            for checkpoint in look():
                with in_use(checkpoint.path):
                    problems = self.verify(checkpoint)
                    if not problems:
                        return checkpoint, skipped
                    if looks_left and not checkpoint.path.exists():
                        break
                skipped.append((checkpoint.path, "; ".join(problems)))
            else:
                break
        return None, skipped

    def _not_saved(self, iteration: int, causes: str) -> str:
        earlier = "earlier checkpoints are untouched" if self.checkpoints() else "there is no earlier one"
        return f"The checkpoint of iteration {iteration} was not saved in {self.directory}: {causes}; {earlier}."


def _files_of(manifest: Manifest, rank: int, *, shared: bool = True) -> list[str]:
    """The files of the shared parts and of those of one rank."""
    return [
        name
        for name in manifest.files
        if name == names.rank_file(rank) or (shared and names.SHARED_FILE.fullmatch(name))
    ]


def _with_metrics(path: Path, metrics: Mapping[str, Any]) -> Manifest:
    with one_writer(path.parent):
        manifest = read_manifest(path)
        changed = replace(manifest, metrics={**manifest.metrics, **plain_metrics(metrics)})
        filesystem.replace_file(path / MANIFEST_NAME, lambda file: file.write(changed.to_json()))
    return changed


def said_to_be_skipped(skipped: list[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Log each skipped checkpoint with its reason; returns the argument."""
    for path, reason in skipped:
        logger.warning("Checkpoint %s is skipped: %s.", path, reason.rstrip("."))
    return skipped
