"""Uploads checkpoints during training, the newest first, until the mirror holds what the folder keeps."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from ignite_engine.checkpoint.layout import scan
from ignite_engine.checkpoint.lock import in_use
from ignite_engine.checkpoint.manifest import MANIFEST_NAME, read_manifest
from ignite_engine.checkpoint.retention import CheckpointInfo, Retention, of_one_run
from ignite_engine.errors import CheckpointError
from ignite_engine.ext.mirror.remote import Remote, why

logger = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 300.0
_LAST_TRIES = 3
"""The number of tries after the run has ended."""


def upload(remote: Remote, checkpoint: Path) -> None:
    """Upload a committed checkpoint, its manifest last; replaces a checkpoint of that name.

    Raises:
        CheckpointError: it is gone, its manifest cannot be read, or (:class:`Torn`) a file does not match the manifest.
    """
    with in_use(checkpoint) as is_there:
        if not is_there:
            raise CheckpointError(f"{checkpoint} was deleted meanwhile.")
        manifest = read_manifest(checkpoint)
        remote.delete(checkpoint.name)
        for name, record in manifest.files.items():
            remote.put(checkpoint / name, f"{checkpoint.name}/{name}", record)
        remote.write(f"{checkpoint.name}/{MANIFEST_NAME}", manifest.to_json())


class Uploader:
    """Uploads the kept checkpoints of a folder in a thread; its methods do not wait for the store.

    Args:
        directory: of the checkpoints.
        retention: decides which checkpoints are kept, in the folder and in the mirror.
    """

    def __init__(self, remote: Remote, directory: Path, retention: Retention) -> None:
        self._remote, self._directory, self._retention = remote, directory, retention
        self._changed = threading.Condition()
        self._is_due = self._is_ending = False
        self._thread: threading.Thread | None = None
        self._damaged: list[CheckpointInfo] = []
        """Damaged checkpoints in the folder."""
        self.missing: str | None = None
        """The name of a checkpoint that is not uploaded yet."""
        self.why = ""
        """Why the last try failed; empty if it did not."""

    def offer(self, checkpoint: Path) -> None:
        """Upload a new checkpoint after the current upload."""
        with self._changed:
            self.missing, self._is_due, self._is_ending = checkpoint.name, True, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end(self) -> None:
        """Upload what is missing and end; failures are retried a few times."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def wait(self, seconds: float) -> bool:
        """Wait for so many seconds; returns whether the uploads have ended, or were given up as the store is silent."""
        if (thread := self._thread) is None:
            return True
        thread.join(seconds)
        return not thread.is_alive() or self._remote.is_silent

    def _run(self) -> None:
        failures, last_tries, is_ending = 0, 0, False
        while True:
            with self._changed:
                if failures:
                    pause = 1.0 if is_ending else min(2.0 ** min(failures - 1, 9), _LONGEST_PAUSE_S)
                    self._changed.wait_for(lambda: self._is_ending and not is_ending, pause)  # noqa: B023  # called here
                else:
                    self._changed.wait_for(lambda: self._is_due or self._is_ending)
                self._is_due, is_ending = False, self._is_ending
            try:
                self._bring_up_to_date()
            except BaseException as error:  # a store may raise anything; this thread receives no KeyboardInterrupt
                self.why = why(error)
                failures, last_tries = failures + 1, last_tries + 1 if is_ending else 0
                if failures == 1:
                    what = self.missing or "What was measured"
                    logger.warning(
                        "%s was not uploaded to %s: %s; it is tried again.", what, self._remote.url, self.why
                    )
            else:
                if failures:
                    logger.warning("%s takes uploads again.", self._remote.url)
                failures, self.why = 0, ""
            with self._changed:
                has_tried = not failures or last_tries >= _LAST_TRIES
                if has_tried and is_ending and self._is_ending and not self._is_due:
                    self._thread = None
                    return

    def _bring_up_to_date(self) -> None:
        self._remote.moved_at = time.monotonic()
        while (checkpoint := self._next()) is not None:
            self.missing = name = checkpoint.path.name
            try:
                upload(self._remote, checkpoint.path)
            except CheckpointError as error:  # of what is here
                if checkpoint.path.exists():  # else it was deleted meanwhile
                    self._damaged.append(checkpoint)
                    logger.warning("%s is not uploaded to %s: %s.", name, self._remote.url, str(error).rstrip("."))
            else:
                logger.info("Uploaded %s to %s.", name, self._remote.url)
                self._tidy(checkpoint)
        self.missing = None

    def _next(self) -> CheckpointInfo | None:
        """The newest kept checkpoint that is not in the mirror; also updates changed manifests there."""
        there = {known.path.name: known.manifest for known in self._remote.checkpoints()[0]}
        for checkpoint in reversed(self._retention.kept(of_one_run(scan(self._directory)[0]))):
            name, manifest = checkpoint.path.name, checkpoint.manifest
            if name not in there or there[name].files != manifest.files:
                if checkpoint not in self._damaged:
                    return checkpoint
            elif there[name] != manifest:
                self._remote.write(f"{name}/{MANIFEST_NAME}", manifest.to_json())
        return None

    def _tidy(self, uploaded: CheckpointInfo) -> None:
        """After an upload, delete what retention does not keep, and what a killed upload has left."""
        readable, damaged = self._remote.checkpoints()
        mine = [each for each in readable if each.manifest.run_id == uploaded.manifest.run_id]
        kept = self._retention.kept(mine)
        old = {each.path.name for each in mine if each not in kept} - {uploaded.path.name}
        whole = {each.path.name for each in readable} | {name for name, _ in damaged}
        for name in self._remote.names():
            if name in old or name not in whole:
                self._remote.delete(name)
