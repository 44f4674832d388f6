"""The mirror of a run's checkpoints: offers each that is saved, and brings the newest back before a resume."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ignite_engine.checkpointing import CheckpointError, CheckpointInfo, SaveOptions
from ignite_engine.checkpointing.in_use import uploads
from ignite_engine.checkpointing.layout import named_iteration
from ignite_engine.checkpointing.store import Checkpoints
from ignite_engine.errors import shortened
from ignite_engine.events import TrainingEvents
from ignite_engine.mirror import MirrorOptions, held
from ignite_engine.mirror.bring import bring, check_new
from ignite_engine.mirror.fetch import clear
from ignite_engine.mirror.followed import RunNotes
from ignite_engine.mirror.remote import Remote
from ignite_engine.mirror.upload import Uploader
from ignite_engine.ranks import agreement, signals
from ignite_engine.text import in_units

if TYPE_CHECKING:
    from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)
_SHOWN_EVERY_S = 10.0


class Mirroring:
    """Between a checkpoint handler and the mirror of its folder.

    Args:
        options: of the saves, with a mirror; it keeps the same as the folder, but for its own ``keep_last``.
        directory: of the checkpoints.

    Raises:
        TypeError, ValueError: one line; the settings are wrong.
    """

    replayed = False

    def __init__(self, options: SaveOptions, directory: Path) -> None:
        assert options.mirror is not None
        self.options = MirrorOptions.of(options.mirror)
        self._retention = replace(options.retention, keep_last=self.options.keep_last or options.keep_last)
        self._directory = directory
        self._runs = False

    @cached_property
    def _remote(self) -> Remote:
        return Remote(self.options.url)

    @cached_property
    def _uploader(self) -> Uploader:
        with uploads(self._directory, alone=True) as is_alone:  # where the locks of links cannot be had, too
            if is_alone:
                held.sweep(self._directory)
        return Uploader(self._remote, self.options, self._retention, RunNotes(self._remote, self._directory))

    def attach(self, trainer: Trainer) -> None:
        """Upload what is saved.

        Raises:
            ValueError: one line; the URL cannot be used.
        """
        url = self.options.url
        if self._remote.is_within(self._directory):
            raise ValueError(f"The mirror {url} is in the folder of the checkpoints itself: give another place.")
        for name, other in trainer.registry.objects.items():
            places = getattr(other, "places", None)
            for place in places if isinstance(places, list) else ():
                if isinstance(place, Mirroring) and place is not self and place.options.url == url:
                    raise ValueError(
                        f"The checkpoint handler {name!r} has the mirror {url}, too: give each one of its own."
                    )
        trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, self._offer_saved)

    def check_new(self) -> None:
        """Refuse a mirror that holds checkpoints; see :func:`ignite_engine.mirror.bring.check_new`."""
        check_new(self._remote)

    def in_front_of(self, store: Checkpoints) -> Checkpoints:
        """Fetch what is newer there; see :func:`ignite_engine.mirror.bring.bring`."""
        bring(self._remote, self._directory, self.options.parallel, self._retention)
        return store

    def resumed(self, found: CheckpointInfo | None) -> None:
        """Offer a checkpoint again: the process before may have been killed before it was uploaded."""
        if found is not None and named_iteration(found.path) is not None and agreement.rank() == 0:
            self._offer(found.path)

    def begin(self, trainer: Trainer) -> None:
        self._runs = True
        if agreement.rank() == 0:
            clear(self._directory)
            self._uploader.begin()

    def _offer_saved(self, trainer: Trainer) -> None:
        path = trainer.state.checkpoint_path
        if path is None or path.parent != self._directory:
            return  # of another handler, or into another folder
        if agreement.rank() == 0:
            self._offer(path)
        if not self._runs:
            self._wait()

    def _offer(self, path: Path) -> None:
        try:
            self._uploader.offer(path)
        except CheckpointError as error:  # it was deleted
            logger.warning("%s is not uploaded to %s: %s", path.name, self.options.url, error)

    def end(self, trainer: Trainer) -> None:
        """Wait until all is uploaded, with a progress line, or name what is not.

        A run that was forced to end does not wait; one that failed on several ranks waits a few seconds, on rank 0
        alone, as a collective may not return. One that only goes back to an earlier checkpoint, or pauses, has not
        ended: its uploads go on.
        """
        if trainer.state.status not in ("completed", "interrupted", "failed"):
            return
        self._runs = False
        failed = trainer.progress.left is not None and trainer.progress.left.ending.name == "FAILED"
        forced = failed and trainer.state.status != "failed"
        if not failed or (not forced and agreement.world_size() == 1):
            self._wait(trainer.state.status)
        elif agreement.rank() == 0:
            if not forced:
                self._uploader.end_soon(trainer.state.status)
            self._name_missing()

    def _wait(self, status: str | None = None) -> None:
        rank_0 = agreement.rank() == 0
        if rank_0:
            self._uploader.end(status)
        shown_at: float | None = None
        try:
            with _interrupted() as interrupted:
                while True:
                    done = not rank_0 or self._uploader.wait(1.0) or self._uploader.stalled
                    ranks = agreement.gather_objects((done, interrupted()))
                    if all(has_ended for has_ended, _ in ranks) or any(stopped for _, stopped in ranks):
                        return
                    is_due = shown_at is None or time.monotonic() - shown_at >= _SHOWN_EVERY_S
                    if rank_0 and is_due and self._uploader.missing:
                        shown_at = time.monotonic()
                        self._show_progress()
        finally:
            if rank_0:
                self._name_missing()

    def _show_progress(self) -> None:
        missing, left = self._uploader.missing, in_units(self._uploader.missing_bytes)
        logger.warning("Uploading %s to %s: %s left. Ctrl-C gives up.", shortened(missing), self.options.url, left)

    def _name_missing(self) -> None:
        uploader, url = self._uploader, self.options.url
        if missing := uploader.missing:
            reason = f" ({uploader.why})" if uploader.why else ""
            which = "--all " if len(missing) > 1 else ""
            push = f"python -m ignite_engine checkpoints push {which}{self._directory} {url}"
            logger.warning("%s is not in %s%s. To upload it later: %s", shortened(missing), url, reason, push)
        uploader.release()


@contextlib.contextmanager
def _interrupted() -> Iterator[Callable[[], bool]]:
    """Within it Ctrl-C, SIGTERM and SIGHUP are only noted; yields whether one came.

    One that has ended the run may come twice, forwarded. After a stop all are ignored, of which Ctrl-C is heard again.
    """
    began, came = time.monotonic(), threading.Event()

    def note(number: int, frame: Any) -> None:
        if time.monotonic() - began >= signals.FORCE_AFTER_S:
            came.set()

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for stop in signals.STOPS:
            for number in {stop, signals.FORWARDED[stop]}:
                if stop == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, note)
    try:
        yield came.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
