"""The mirror of a run's checkpoints: offers each that is saved, and brings the newest back before a resume."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ignite_engine.checkpointing import CheckpointInfo, SaveOptions
from ignite_engine.checkpointing.layout import named_iteration
from ignite_engine.checkpointing.store import Checkpoints
from ignite_engine.events import TrainingEvents
from ignite_engine.ext.mirror.fetch import bring, check_new
from ignite_engine.ext.mirror.remote import Remote
from ignite_engine.ext.mirror.upload import Uploader
from ignite_engine.ranks import agreement, signals

if TYPE_CHECKING:
    from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)
_SHOWN_EVERY_S = 10.0
_OF_A_FAILED_RUN_S = 5.0
"""So long a run that has failed waits for its last upload, on rank 0 alone: a collective may not return."""


class Mirroring:
    """Between a checkpoint handler and the mirror of its folder, which keeps the same as the folder.

    Args:
        options: of the saves, with a mirror.
        directory: of the checkpoints.

    Raises:
        ValueError: one line; the URL cannot be used.
    """

    replayed = False

    def __init__(self, options: SaveOptions, directory: Path) -> None:
        assert options.mirror is not None
        self.url = os.fspath(options.mirror)
        self._retention, self._directory = options.retention, directory
        self._remote = Remote(self.url)
        self._uploader = Uploader(self._remote, directory, self._retention)
        self._runs = False

    def attach(self, trainer: Trainer) -> None:
        """Upload what is saved.

        Raises:
            ValueError: one line; it is in the folder itself.
        """
        if self._remote.is_within(self._directory):
            raise ValueError(f"The mirror {self.url} is in the folder of the checkpoints itself: give another place.")
        trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, self._offer_saved)

    def check_new(self) -> None:
        """Refuse a mirror that holds checkpoints; see :func:`ignite_engine.ext.mirror.fetch.check_new`."""
        check_new(self._remote)

    def in_front_of(self, store: Checkpoints) -> Checkpoints:
        """Fetch what is newer there; see :func:`ignite_engine.ext.mirror.fetch.bring`."""
        bring(self._remote, self._directory, self._retention)
        return store

    def resumed(self, found: CheckpointInfo | None) -> None:
        """Offer a checkpoint again: the process before may have been killed before it was uploaded."""
        if found is not None and named_iteration(found.path) is not None and agreement.rank() == 0:
            self._uploader.offer(found.path)

    def begin(self, trainer: Trainer) -> None:
        self._runs = True

    def _offer_saved(self, trainer: Trainer) -> None:
        path = trainer.state.checkpoint_path
        if path is None or path.parent != self._directory:
            return  # of another handler
        if agreement.rank() == 0:
            self._uploader.offer(path)
        if not self._runs:
            self._wait()

    def end(self, trainer: Trainer) -> None:
        """Wait until the newest is uploaded, with a progress line, or name it.

        A run that was forced to end does not wait, and one that has failed does so for a few seconds. One that only
        goes back to an earlier checkpoint, or pauses, has not ended: its uploads go on.
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
                    logger.warning("Uploading %s to %s. Ctrl-C gives up.", self._uploader.missing, self.url)
        if rank_0:
            self._name_missing()

    def _name_missing(self) -> None:
        if missing := self._uploader.missing:
            reason = f" ({self._uploader.why})" if self._uploader.why else ""
            push = f"python -m ignite_engine checkpoints push {self._directory} {self.url}"
            logger.warning("%s is not in %s%s. To upload it later: %s", missing, self.url, reason, push)


@contextlib.contextmanager
def _interrupted() -> Iterator[Callable[[], bool]]:
    """Within it Ctrl-C is only noted; yields whether it came. One that has ended the run may come twice."""
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
