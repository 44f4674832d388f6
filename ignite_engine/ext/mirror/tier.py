"""The mirror as a tier: uploads each checkpoint that is saved, and provides the newest to a resume."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ignite_engine.checkpoint.layout import scan
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.states.tiers import Fetched, Folder, Offer, SavedRun, Tier
from ignite_engine.errors import check_type
from ignite_engine.ext.mirror.fetch import fetch, together
from ignite_engine.ext.mirror.remote import Remote, Torn
from ignite_engine.ext.mirror.upload import Uploader
from ignite_engine.ranks import agreement, signals

if TYPE_CHECKING:
    from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)
T = TypeVar("T")
_SHOWN_EVERY_S = 10.0
_OF_A_FAILED_RUN_S = 5.0
"""How long a failed run waits for its last upload, on rank 0 only, as a collective might not return."""


class MirrorTier(Tier):
    """A copy of the checkpoints that a run keeps, in a second place.

    Args:
        value: a directory or a URL of ``fsspec``, without credentials.
        run: the run whose folder is mirrored.

    Raises:
        TypeError, ValueError: one line; the value cannot be used.
    """

    def __init__(self, value: Any, run: SavedRun) -> None:
        check_type("mirror", value, isinstance(value, str | PathLike), "a directory or a URL")
        self._directory, self._retention = run.store.directory, run.options
        self._remote = Remote(os.fspath(value))
        self._uploader = Uploader(self._remote, self._directory, self._retention)
        self._of_run: list[CheckpointInfo] = []
        self._runs = False

    def __str__(self) -> str:
        return self._remote.url

    def attach(self, trainer: Trainer) -> None:
        if self._remote.is_within(self._directory):
            raise ValueError(f"The mirror {self} is in the folder of the checkpoints itself: give another place.")

    def candidates(self) -> Offer:
        """The checkpoints of the run that last saved in the folder; if that is empty, of the last run in the mirror."""
        there, damaged = self._asked(self._remote.checkpoints)
        here = agreement.on_rank_0(lambda: scan(self._directory)[0])
        last = here[-1] if here else max(there, key=lambda checkpoint: checkpoint.manifest.created_at, default=None)
        if last is None and not damaged and agreement.rank() == 0:
            logger.warning("%s holds no checkpoint.", self)
        run_id = None if last is None else last.manifest.run_id
        self._of_run = [checkpoint for checkpoint in there if checkpoint.manifest.run_id == run_id]
        reasons = [(Path(name), f"{reason.rstrip('.')} ({self})") for name, reason in damaged]
        return Offer(self._of_run, reasons if self._of_run or not there else [])

    def fetch(self, candidate: CheckpointInfo, folder: Folder) -> Fetched:
        """Fetch the checkpoint and the best ones into the folder."""
        here = {checkpoint.path.name for checkpoint in folder.candidates().checkpoints} | {candidate.path.name}
        # the best first: once the newest is here, a later resume fetches nothing
        for best in self._retention.best_of(self._of_run):
            if best.path.name not in here:
                try:
                    fetch(self._remote, self._directory, best)
                except Torn as torn:
                    logger.warning("Checkpoint %s in %s is skipped: %s.", best.path.name, self, str(torn).rstrip("."))
        committed = fetch(self._remote, self._directory, candidate)
        return folder.fetch(CheckpointInfo(committed, candidate.manifest), folder)

    def push(self, checkpoint: Path) -> None:
        if agreement.rank() == 0:
            self._uploader.offer(checkpoint)
        if not self._runs:
            self._wait()

    def begin(self, trainer: Trainer) -> None:
        self._runs = True

    def end(self, trainer: Trainer) -> None:
        """Wait until the newest checkpoint is uploaded, with a progress line; or name it as missing.

        A run that was forced to end does not wait, a failed one waits for a few seconds. Uploads continue while a run
        rolls back or pauses.
        """
        if trainer.state.status not in ("completed", "interrupted", "failed"):
            return
        self._runs = False
        if not trainer.progress.failed:
            self._wait()
        elif agreement.rank() == 0:
            self._uploader.end()
            if trainer.state.status == "failed":  # else it was forced to
                self._uploader.wait(_OF_A_FAILED_RUN_S)
            self._name_missing()

    def _asked(self, question: Callable[[], T]) -> T:
        """The store's answer to rank 0, on all ranks; raises Unreachable without one."""
        answers = together(self._remote, lambda: [question()] if agreement.rank() == 0 else [])
        return answers[0][0]

    def _wait(self) -> None:
        rank_0 = agreement.rank() == 0
        if rank_0:
            self._uploader.end()
        shown_at = -_SHOWN_EVERY_S
        with _interrupted() as interrupted:
            while True:
                done = not rank_0 or self._uploader.wait(1.0)
                ranks = agreement.gather_objects((done, interrupted()))
                if all(has_ended for has_ended, _ in ranks) or any(stopped for _, stopped in ranks):
                    break
                if rank_0 and time.monotonic() - shown_at >= _SHOWN_EVERY_S:
                    shown_at = time.monotonic()
                    logger.warning("Uploading %s to %s. Ctrl-C gives up.", self._uploader.missing, self)
        if rank_0:
            self._name_missing()

    def _name_missing(self) -> None:
        if missing := self._uploader.missing:
            reason = f" ({self._uploader.why})" if self._uploader.why else ""
            push = f"python -m ignite_engine checkpoints push {self._directory} {self}"
            logger.warning("%s is not in %s%s. To upload it later: %s", missing, self, reason, push)


@contextlib.contextmanager
def _interrupted() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C within the body instead of raising it; ignores a repetition of the one that ended the run."""
    began, came = time.monotonic(), threading.Event()

    def note(number: int, frame: object) -> None:
        if time.monotonic() - began >= signals.FORCE_AFTER_S:
            came.set()

    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    numbers = (signal.SIGINT, signals.FORCE) if signals.parent_counts else (signal.SIGINT,)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield came.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
