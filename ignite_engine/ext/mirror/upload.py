"""Uploads checkpoints beside training: one at a time, the newest next, again after a failure."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from ignite_engine.checkpointing.in_use import in_use
from ignite_engine.checkpointing.layout import scan
from ignite_engine.checkpointing.manifest import MANIFEST_NAME, Manifest, read_manifest
from ignite_engine.checkpointing.retention import CheckpointInfo, Retention
from ignite_engine.errors import CheckpointError
from ignite_engine.ext.mirror.remote import Remote, Torn, order, why

logger = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 300.0
_LAST_TRIES = 3
"""Tries after the run has ended."""


def upload(remote: Remote, checkpoint: Path) -> Manifest:
    """Put a committed checkpoint there, its manifest last; what is there under its name is replaced.

    Raises:
        Torn: it is not what was saved.
        CheckpointError: it is not there, or its manifest cannot be read.
    """
    with in_use(checkpoint) as is_there:
        if not is_there:
            raise CheckpointError(f"{checkpoint} was deleted meanwhile.")
        manifest = read_manifest(checkpoint)
        remote.delete(checkpoint.name)
        for name, record in manifest.files.items():
            remote.put(checkpoint / name, f"{checkpoint.name}/{name}", record)
        remote.write(f"{checkpoint.name}/{MANIFEST_NAME}", manifest.to_json())
    return manifest


class Uploader:
    """Uploads what it is offered in a thread; nothing here waits for the store.

    Args:
        directory: of the checkpoints.
        retention: what is kept of the run there.
    """

    def __init__(self, remote: Remote, directory: Path, retention: Retention) -> None:
        self._remote, self._directory, self._retention = remote, directory, retention
        self._changed = threading.Condition()
        self._wanted: Path | None = None
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._there: dict[str, Manifest] | None = None
        """What is complete there; None: it is to be looked for, at first and after a failure."""
        self.why = ""
        """Why the last try failed; empty: it did not."""

    def offer(self, checkpoint: Path) -> None:
        """Upload a committed checkpoint, after the one that is being uploaded and instead of one that waits."""
        with self._changed:
            self._wanted, self._is_ending = checkpoint, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
                self._thread.start()
            self._changed.notify()

    @property
    def missing(self) -> str | None:
        """Name of the newest checkpoint that was offered, as long as it is not there."""
        wanted = self._wanted
        return None if wanted is None else wanted.name

    def end(self) -> None:
        """Upload what is missing and end; a failure is tried again a few times."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, or is given up as the store is silent, within so many seconds."""
        if (thread := self._thread) is None:
            return True
        thread.join(seconds)
        return not thread.is_alive() or self._remote.is_silent

    def _run(self) -> None:
        failures = last_tries = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None or self._is_ending)
                wanted, is_ending = self._wanted, self._is_ending
            self._remote.moved_at = time.monotonic()
            try:
                self._bring_up_to_date(wanted)
            except BaseException as error:  # a store may raise anything, in this thread no interruption comes
                self.why, self._there = why(error), None
                failures, last_tries = failures + 1, last_tries + 1 if is_ending else 0
                if failures == 1:
                    what = "What was measured" if wanted is None else wanted.name
                    logger.warning(
                        "%s was not uploaded to %s: %s; it is tried again.", what, self._remote.url, self.why
                    )
                if last_tries < _LAST_TRIES:
                    self._pause(1.0 if is_ending else min(2.0 ** min(failures - 1, 9), _LONGEST_PAUSE_S))
                    continue
            else:
                if failures and wanted is not None:
                    logger.warning("%s takes uploads again: %s is there.", self._remote.url, wanted.name)
                failures, self.why = 0, ""
            with self._changed:
                if not failures and self._wanted == wanted:
                    self._wanted = None
                if is_ending and self._is_ending:
                    self._thread = None
                    return

    def _pause(self, seconds: float) -> None:
        with self._changed:
            was_ending = self._is_ending
            self._changed.wait_for(lambda: self._is_ending and not was_ending, seconds)

    def _bring_up_to_date(self, wanted: Path | None) -> None:
        if self._there is None:
            self._there = self._look()
        if wanted is not None:
            try:
                self._upload(wanted, self._there)
            except (Torn, CheckpointError) as error:  # of what is here
                logger.warning("%s is not uploaded to %s: %s.", wanted.name, self._remote.url, str(error).rstrip("."))
        for checkpoint in scan(self._directory)[0]:  # values may have been added since
            name, manifest = checkpoint.path.name, checkpoint.manifest
            known = self._there.get(name, manifest)
            if known != manifest and known.files == manifest.files:
                self._remote.write(f"{name}/{MANIFEST_NAME}", manifest.to_json())
                self._there[name] = manifest

    def _look(self) -> dict[str, Manifest]:
        """What is complete there; what a killed upload has left goes."""
        readable, unreadable = self._remote.checkpoints()
        there = {checkpoint.path.name: checkpoint.manifest for checkpoint in readable}
        for name in {*self._remote.names()} - there.keys() - {name for name, _ in unreadable}:
            self._remote.delete(name)
        return there

    def _upload(self, checkpoint: Path, there: dict[str, Manifest]) -> None:
        manifest, known = read_manifest(checkpoint), there.pop(checkpoint.name, None)
        if known is None or known.files != manifest.files:
            known = upload(self._remote, checkpoint)
            logger.info("Uploaded %s to %s.", checkpoint.name, self._remote.url)
        there[checkpoint.name] = known
        mine = [CheckpointInfo(Path(name), each) for name, each in there.items() if each.run_id == known.run_id]
        kept = self._retention.kept(sorted(mine, key=order))
        for name in [old.path.name for old in mine if old not in kept and old.path.name != checkpoint.name]:
            self._remote.delete(name)
            del there[name]
