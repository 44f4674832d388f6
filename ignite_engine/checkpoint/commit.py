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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ignite_engine.checkpoint import filesystem
from ignite_engine.checkpoint import layout as names
from ignite_engine.checkpoint.contents import Contents
from ignite_engine.checkpoint.environment import environment_values
from ignite_engine.checkpoint.filesystem import FileRecord, in_threads
from ignite_engine.checkpoint.lock import lock, unused
from ignite_engine.checkpoint.manifest import (
    MANIFEST_NAME,
    Facts,
    Manifest,
    current_versions,
    plain_config,
    plain_metrics,
)
from ignite_engine.checkpoint.pack import write_pack
from ignite_engine.checkpoint.retention import superseded
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Written:
    """What one rank sends to the others about its part."""

    iteration: int
    files: dict[str, FileRecord]
    parts: dict[str, list[str]]
    reproducibility: list[str]
    healthy: bool
    missing: dict[str, int]
    """See :class:`Contents`."""


class Commit:
    """The save of one checkpoint by all ranks; leaving the context without ``finish`` removes what was written.

    Args:
        directory: of the store.
        iteration: updates done.
        how: arguments of :func:`~ignite_engine.ranks.agreement.agreed`, by which all ranks succeed or fail.
    """

    def __init__(self, directory: Path, iteration: int, **how: Any) -> None:
        self._directory = directory
        self._iteration = iteration
        self._how = how
        self._temporary: Path | None = None
        self._written: list[_Written] = []
        self._facts: Facts = {}
        self._contents = Contents({})
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()
        if agreement.rank() == 0 and self._temporary is not None and self._temporary.exists():
            # the error that ended the save is the one to report; what cannot be removed now is swept later
            with contextlib.suppress(OSError):
                filesystem.remove_tree(self._temporary)

    def begin(self, facts: Facts) -> None:
        """Make the temporary directory; a collective.

        Args:
            facts: what the manifest will say beside what is known here.
        """
        self._facts = facts

        def make() -> Path:
            self._facts = {
                **facts,
                "metrics": plain_metrics(facts.get("metrics")),
                "config": plain_config(facts.get("config")),
            }
            filesystem.ensure_directory(self._directory)
            # known before it is made: an interrupt in between must not leave it behind
            self._temporary = names.temporary_path(self._directory, self._iteration)
            filesystem.make_directory(self._temporary)
            self._lock.enter_context(lock(self._temporary))
            return self._temporary

        self._temporary = agreement.on_rank_0(make, **self._how)

    def write(self, contents_of: Callable[[int], Contents]) -> None:
        """Write this rank's files; a collective, at whose end all ranks have written theirs.

        Args:
            contents_of: gives what a rank writes.
        """
        assert self._temporary is not None
        temporary = self._temporary

        def write() -> _Written:
            self._contents = contents = contents_of(agreement.rank())
            files = contents.files
            records = in_threads(
                lambda name: write_pack(temporary / name, files[name]),
                *(files, contents.writers),
            )
            return _Written(
                iteration=self._iteration,
                files=dict(zip(files, records, strict=True)),
                parts={name: list(parts) for name, parts in files.items()},
                reproducibility=list(self._facts.get("reproducibility", ())),
                healthy=self._facts.get("healthy", True) and contents.healthy,
                missing=dict(contents.missing),
            )

        self._written = agreement.agreed(write, **self._how)

    def finish(self, epoch: int) -> tuple[Path, Manifest]:
        """Write the manifest, rename; a collective.

        Returns:
            The committed directory and its manifest.
        """

        def commit() -> tuple[Path, Manifest]:
            assert self._temporary is not None
            manifest = self._manifest(epoch)
            filesystem.synchronise_directory(self._temporary)
            filesystem.write_file(self._temporary / MANIFEST_NAME, lambda file: file.write(manifest.to_json()))
            filesystem.synchronise_directory(self._temporary)
            committed = names.free_name(self._directory, self._iteration)
            filesystem.rename(self._temporary, committed)
            filesystem.synchronise_directory(self._directory)
            return self._replace_older(committed), manifest

        return agreement.on_rank_0(commit, **self._how)

    def _replace_older(self, committed: Path) -> Path:
        """Discard what this checkpoint supersedes and give it the plain name, if that is free then."""
        plain = self._directory / names.checkpoint_name(self._iteration)
        if committed == plain:
            return plain
        same = [checkpoint for checkpoint in names.scan(self._directory)[0] if checkpoint.iteration == self._iteration]
        try:
            with unused(checkpoint.path for checkpoint in superseded(same)) as free:
                names.discard(sorted(free))
        except OSError as error:  # the new one is committed
            logger.warning("A checkpoint that %s replaces cannot be deleted: %s.", committed, one_line(error))
        # a healthy one that a broken one does not replace, one that others read, or one that cannot be read
        if os.path.lexists(plain):
            return committed
        filesystem.rename(committed, plain)
        filesystem.synchronise_directory(self._directory)
        return plain

    def _manifest(self, epoch: int) -> Manifest:
        iterations = sorted({written.iteration for written in self._written})
        if len(iterations) > 1:
            raise CheckpointError(f"the ranks are at different iterations: {iterations}")
        if incomplete := _incomplete(self._written):
            raise CheckpointError(f"the ranks do not hold the whole of {', '.join(incomplete)} together")
        earlier, unreadable = names.scan(self._directory)
        same = [checkpoint.manifest for checkpoint in earlier if checkpoint.iteration == self._iteration]
        files = {name: record for written in self._written for name, record in written.files.items()}
        known = {
            "iteration": self._iteration,
            "epoch": epoch,
            # what cannot be read now may be read again
            "sequence": 1 + len(unreadable) + max((each.manifest.sequence for each in earlier), default=0),
            "world_size": agreement.world_size(),
            "versions": current_versions(),
            "files": files,
            "parts": {name: parts for written in self._written for name, parts in written.parts.items()},
            "created_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "reproducibility": _unique(reason for written in self._written for reason in written.reproducibility),
            "healthy": all(written.healthy for written in self._written),
            "labels": _unique(
                [*(label for manifest in same for label in manifest.labels), *self._facts.get("labels", ())]
            ),
            "environment": {**environment_values(agreement.world_size()), **self._contents.environment},
        }
        return Manifest(**{**self._facts, **known})  # type: ignore[arg-type]  # keys and types are those of Facts


def _incomplete(written: list[_Written]) -> list[str]:
    """Parts that were not written once and whole."""
    parts = _unique(part for rank in written for part in rank.missing)
    return [part for part in parts if sum(rank.missing.get(part, 0) for rank in written)]


def _unique(words: Any) -> list[str]:
    return list(dict.fromkeys(str(word) for word in words))
