"""Uploads checkpoints beside training: one at a time, the newest next, again after a failure."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ignite_engine.checkpointing.filesystem import Signature, open_regular, signature
from ignite_engine.checkpointing.in_use import uploads
from ignite_engine.checkpointing.manifest import MANIFEST_NAME, Manifest, parse_manifest, read_manifest
from ignite_engine.checkpointing.retention import CheckpointInfo, Retention
from ignite_engine.errors import CheckpointError, shortened
from ignite_engine.followed_log import FollowedLog, Line, missing_values
from ignite_engine.mirror.followed import BEAT_S, RunNotes
from ignite_engine.mirror.held import Held, hold
from ignite_engine.mirror.options import MirrorOptions
from ignite_engine.mirror.remote import Lost, Remote, Torn, order, why
from ignite_engine.mirror.threads import in_threads
from ignite_engine.mirror.waiting import STALLED_S, Throttle, Unreachable, patiently

logger = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 300.0
_LAST_TRIES = 3
"""Tries of an upload after the run has ended."""
_BRIEFLY_S = 1.5
_LOOKS_FOR_A_PUSH_S = 0.5


class Contents:
    """What a mirror holds, as far as this process knows; changes it.

    Args:
        retention: what is kept of the run.
    """

    def __init__(self, remote: Remote, retention: Retention | None, parallel: int = 4) -> None:
        self.remote = remote
        self._retention, self._parallel = retention, parallel
        readable, unreadable = remote.checkpoints()
        self.complete = {checkpoint.path.name: checkpoint.manifest for checkpoint in readable}
        self._names = {*remote.names(), *(name for name, _ in unreadable)}
        """The names of all that may be deleted; what another process uploads later is not among them."""
        self._whole: set[str] = set()
        """Those whose files were seen to be there."""

    def upload(self, held: Held, moved: Callable[[int], None]) -> None:
        """Put a checkpoint and those that it needs there; nothing, if they are.

        Raises:
            Torn: it is not what was saved.
            FileNotFoundError: it was deleted here meanwhile.
            Lost: a file was deleted there meanwhile; it has no manifest there.
        """
        for name in held.manifests:
            with open_regular(held.manifest(name)) as file:
                text = file.read()
            manifest = parse_manifest(held.manifest(name), text)
            known = self.complete.get(name)
            if known is not None and known.files == manifest.files:
                if not (lost := self._lost(name, known)):
                    self.update_manifest(name, manifest)
                    continue
                held.uploaded.update(f"{name}/{file}" for file in manifest.files)
                held.uploaded.difference_update(f"{name}/{file}" for file in lost)
            elif known is not None or (name in self._names and not held.uploaded):
                self.complete.pop(name, None)
                self.remote.delete(name)
                held.uploaded.difference_update(f"{name}/{file}" for file in manifest.files)
            self._names.add(name)
            self._upload_files(held, name, manifest, moved)
            if lost := self.remote.lost(name, manifest.files):  # by a process that took them for a leftover
                held.uploaded.difference_update(f"{name}/{file}" for file in lost)
                raise Lost(f"{name}/{lost[0]} was deleted there, or replaced, after its upload")
            if name in self.complete:
                self.update_manifest(name, manifest)
            else:
                self.replace_manifest(name, manifest)
            self._whole.add(name)

    def _lost(self, name: str, manifest: Manifest) -> list[str]:
        """Files of a complete one that are not there; it is asked once."""
        lost = [] if name in self._whole else self.remote.lost(name, manifest.files)
        if not lost:
            self._whole.add(name)
        return lost

    def _upload_files(self, held: Held, name: str, manifest: Manifest, moved: Callable[[int], None]) -> None:
        def put(file: str) -> None:
            path = f"{name}/{file}"
            if path not in held.uploaded:
                self.remote.put(held.file(name, file), path, manifest.files[file], moved)
                held.uploaded.add(path)

        in_threads(put, manifest.files, self._parallel)

    def replace_manifest(self, name: str, manifest: Manifest) -> None:
        """Write the manifest of a checkpoint whose files are there."""
        self.remote.write(f"{name}/{MANIFEST_NAME}", manifest.to_json())
        self.complete[name] = manifest

    def update_manifest(self, name: str, manifest: Manifest) -> None:
        """As :meth:`replace_manifest`, where it is another one; what a follower has added to it there stays."""
        known = self.complete[name]
        if (joined := replace(manifest, metrics={**known.metrics, **manifest.metrics})) != known:
            self.replace_manifest(name, joined)

    def add_measured(self, lines: Iterable[Line]) -> None:
        """Add what a follower has measured to the manifests that lack it."""
        for name, manifest in list(self.complete.items()):
            if values := missing_values(CheckpointInfo(Path(name), manifest), lines):
                self.replace_manifest(name, replace(manifest, metrics={**manifest.metrics, **values}))

    def prune(self, newest: str, notes: RunNotes | None = None) -> list[str]:
        """Delete what retention does not keep of the run, and what is no checkpoint; returns their names.

        Args:
            newest: a checkpoint of the run. Those of other runs stay.
            notes: what a follower holds, or has found to be one of the best, stays, too.
        """
        if self._retention is None:
            return []
        leaving = self._leaving(self._retention, newest, () if notes is None else notes.held)
        if notes is not None and leaving:
            notes.leave(leaving)
            self.add_measured(notes.lines)
            now = self._leaving(self._retention, newest, notes.held)
            leaving = [name for name in leaving if name in now]
        for name in leaving:
            self.complete.pop(name, None)
            self.remote.delete(name)
            self._names.discard(name)
        return leaving

    def _leaving(self, retention: Retention, newest: str, held: Collection[str]) -> list[str]:
        run = self.complete[newest].run_id
        mine = [
            CheckpointInfo(Path(name), manifest) for name, manifest in self.complete.items() if manifest.run_id == run
        ]
        kept = retention.kept(sorted(mine, key=order))
        kept += [checkpoint for checkpoint in mine if checkpoint.path.name in held]
        staying = {checkpoint.path.name for checkpoint in kept}
        others = {name for name, manifest in self.complete.items() if manifest.run_id != run}
        return sorted(self._names - staying - others - {newest}, reverse=True)


class Uploader:
    """Uploads what it is offered in a thread; nothing here waits for the store.

    Args:
        remote: where to.
        retention: what is kept there.
        notes: what is exchanged with a follower; None: nothing.
    """

    def __init__(
        self, remote: Remote, options: MirrorOptions, retention: Retention, notes: RunNotes | None = None
    ) -> None:
        self._remote, self._options, self._retention, self._notes = remote, options, retention, notes
        rate = options.max_mib_per_s
        self._throttle = Throttle(None if rate is None else rate * 2**20)
        self._lock = threading.Lock()
        self._offered = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._runs = False
        """The thread does, and sees what is offered; by the lock."""
        self._turn = contextlib.ExitStack()
        """Holds the right to write beside no push."""
        self._directory: Path
        """Where what is offered is; known before the thread starts."""
        self._current: Held | None = None
        self._waiting: Held | None = None
        self._contents: Contents | None = None
        """None: it is to be looked for, at first and after a failure."""
        self._uploaded: dict[Path, Signature | None] = {}
        """Checkpoints that were uploaded, by the manifest that was."""
        self._followed_log: tuple[Signature | None, list[Line]] = (None, [])
        """What was read of it, and as it was then."""
        self._failures = 0
        self._why = ""
        self._has_named_others = False
        self._sending = self._was_stalled = False
        self._ends_as: str | None = None

    def begin(self) -> None:
        """Say that the run trains, and look for what a follower has measured."""
        self._ends_as = None
        self._ending.clear()
        if self._notes is not None:
            self._directory = self._notes.directory
            self._notes.begin()
            self._start()

    def offer(self, checkpoint: Path) -> None:
        """Upload a committed checkpoint, after the one that is being uploaded and instead of one that waits."""
        held, self._directory = hold(checkpoint), checkpoint.parent
        with self._lock:
            dropped, self._waiting = self._waiting, held
        if dropped is not None:
            self._drop(dropped, "a newer one was saved before its upload began")
        self._ending.clear()
        self._start()
        if self.stalled and not self._was_stalled:
            logger.warning(
                "Nothing has been sent to %s for %.0f s; what is saved meanwhile waits.", self._remote.url, STALLED_S
            )
        self._was_stalled = self.stalled

    def _start(self) -> None:
        with self._lock:
            if not self._runs:
                self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
                self._thread.start()
                self._runs = True
        self._offered.set()

    def _may_end(self, *, given_up: bool = False) -> bool:
        """Whether the thread ends: the run has, and has not gone on since; with what waits given up, too."""
        with self._lock:
            self._runs = not self._ending.is_set() or (self._waiting is not None and not given_up)
            return not self._runs

    @property
    def stalled(self) -> bool:
        """It is uploading, and no byte has moved for long."""
        return self._sending and self._throttle.stalled_s > STALLED_S

    @property
    def missing(self) -> list[str]:
        """Names of the checkpoints that were offered and are not there yet."""
        with self._lock:
            return [held.name for held in (self._current, self._waiting) if held is not None]

    @property
    def why(self) -> str:
        """Why the last upload failed, or nothing."""
        return self._why if self._failures else ""

    @property
    def sent_bytes(self) -> int:
        """All that was sent."""
        return self._throttle.moved

    @property
    def missing_bytes(self) -> int:
        """The bytes that are still to be uploaded, roughly."""
        with self._lock:
            waiting = [held for held in (self._current, self._waiting) if held is not None]
        return sum(
            record.bytes
            for held in waiting
            for name, manifest in held.manifests.items()
            for file, record in manifest.files.items()
            if f"{name}/{file}" not in held.uploaded
        )

    def end(self, status: str | None = None) -> None:
        """Upload what is missing, say how the run has ended, and end; a failure is tried again a few times."""
        self._ends_as = status
        self._ending.set()
        if self._thread is not None:
            self._start()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, within so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def end_soon(self, status: str) -> None:
        """As :meth:`end`, with what is uploaded within a moment."""
        self.end(status)
        self.wait(_BRIEFLY_S)

    def release(self) -> None:
        """Let go of what was not uploaded, and say how the run has ended; waits a few seconds for a silent store."""
        with self._lock:
            held, self._current, self._waiting = [self._current, self._waiting], None, None
        self._failures = 0
        for checkpoint in held:
            if checkpoint is not None:
                checkpoint.release()
        self._turn.close()  # a thread that waits for a silent store keeps no push from beginning
        if (notes := self._notes) is not None:
            notes.close()
            if (status := self._ends_as) is not None and not notes.has_said(status):
                with contextlib.suppress(Unreachable):
                    patiently(lambda _: notes.say(status), _BRIEFLY_S)

    def _run(self) -> None:
        tries = 0
        while True:
            self._offered.wait(None if self._notes is None else BEAT_S)
            with self._lock:
                if self._current is None:
                    self._current, self._waiting = self._waiting, None
                if self._current is None:
                    self._offered.clear()
            self._throttle(0)  # the time without a byte begins here
            self._sending = True
            if self._current is None and not self._ending.is_set():
                with contextlib.suppress(BaseException):  # of the store, which the next upload names
                    self._exchange_notes()
                    with contextlib.ExitStack() as self._turn:
                        if self._turn.enter_context(uploads(self._directory, alone=False)):
                            self._write_manifests()
                self._sending = False
                continue
            ending, sent = self._ending.is_set(), self._throttle.moved
            try:
                if self._current is None:
                    if self._waiting is not None:  # it was offered after the look above
                        continue
                    with self._beside_no_push():
                        if self._waiting is not None or not self._ending.is_set():  # the run goes on by now
                            continue
                        self._replace_changed_manifests()  # a failure is tried again before the end is said
                        self._look_last()
                    if self._may_end():
                        return
                    continue
                with self._beside_no_push():
                    if (held := self._current) is not None:  # else it was given up meanwhile
                        self._upload(held)
            except BaseException as error:  # a store may raise anything, in this thread no interruption comes
                tries = tries + 1 if ending else 0
                self._sending = False
                self._failed(error, sent)
                if tries >= _LAST_TRIES:
                    self._sending = True
                    with contextlib.suppress(BaseException), self._beside_no_push():  # of the store, which was named
                        self._look_last()
                    if self._may_end(given_up=True):
                        return
                self._pause()
            finally:
                self._sending = False

    @contextlib.contextmanager
    def _beside_no_push(self) -> Iterator[None]:
        """Wait until no other process uploads from the folder: what it has not completed would count as a leftover."""
        has_waited = False
        while True:
            with contextlib.ExitStack() as self._turn:
                if self._turn.enter_context(uploads(self._directory, alone=False)):
                    self._throttle(0)  # no byte was expected before
                    self._sending = True
                    yield
                    return
            if not has_waited:
                logger.warning("Uploads to %s wait until a push from %s ends.", self._remote.url, self._directory)
            has_waited, self._contents = True, None
            if self._ending.is_set() and not self._sending:  # the end waits no longer than for a silent store
                self._throttle(0)
            self._sending = self._ending.is_set()
            time.sleep(_LOOKS_FOR_A_PUSH_S)

    def _upload(self, held: Held) -> None:
        if self._notes is not None:
            self._notes.look()  # says that this run is here, before it looks for another one
            self._notes.check_alone()
        if self._contents is None:
            self._contents = self._look_what_is_there()
            self._name_another_run(held.manifests[held.name].run_id)
        sent = self._throttle.moved
        before = signature(held.checkpoint / MANIFEST_NAME)  # values may be added to it meanwhile
        try:
            self._contents.upload(held, self._throttle)
            self._uploaded[held.checkpoint] = before
            self._look()
            if self._current is held:
                self._contents.prune(held.name, self._notes)
        except (Torn, CheckpointError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and held.file(held.name, MANIFEST_NAME).exists():
                raise  # it is there; the store has said so
            if self._current is not held:
                return  # it was given up meanwhile
            self._current = None
            self._drop(held, "it was deleted meanwhile" if isinstance(error, FileNotFoundError) else why(error))
            return
        with self._lock:
            self._current = None
        held.release()
        if self._failures:
            logger.warning("%s takes uploads again: %s is there.", self._remote.url, held.name)
        self._failures = 0
        if self._throttle.moved > sent:
            logger.info("Uploaded %s to %s.", held.name, self._remote.url)

    def _look_what_is_there(self) -> Contents:
        return Contents(self._remote, self._retention, self._options.parallel)

    def _name_another_run(self, run_id: str | None) -> None:
        assert self._contents is not None
        others = [name for name, manifest in self._contents.complete.items() if manifest.run_id != run_id]
        if others and not self._has_named_others:
            logger.warning(
                "%s holds %s of another run, too: a resume in an empty folder takes the run that has saved there last. "
                "Give each run a mirror of its own.",
                *(self._remote.url, shortened(others, 1)),
            )
        self._has_named_others = True

    def _look(self) -> None:
        self._exchange_notes()  # first: how the run has ended is said though the mirror cannot be listed
        self._write_manifests()

    def _exchange_notes(self) -> None:
        if self._notes is not None:
            self._notes.look()

    def _write_manifests(self) -> None:
        self._replace_changed_manifests()
        if self._contents is not None:
            lines = [] if self._notes is None else self._notes.lines
            self._contents.add_measured([*lines, *self._measured_beside()])

    def _measured_beside(self) -> list[Line]:
        """What followers in the run's folder have measured, also of checkpoints that retention has deleted there."""
        log, (before, lines) = FollowedLog.beside(self._directory), self._followed_log
        if (now := signature(log.path)) != before:
            self._followed_log = now, lines = now, log.lines()
        return lines

    def _look_last(self) -> None:
        """Say how the run has ended; a follower that reads it looks for no more checkpoints after that."""
        if self._notes is not None and self._ends_as is not None:
            self._notes.status = self._ends_as
        self._look()

    def _replace_changed_manifests(self) -> None:
        """Values that were measured after a save are in its manifest here by now."""
        if not self._uploaded:
            return
        contents = self._contents = self._contents or self._look_what_is_there()
        for checkpoint, before in list(self._uploaded.items()):
            now = signature(checkpoint / MANIFEST_NAME)
            if now is None or checkpoint.name not in contents.complete:
                del self._uploaded[checkpoint]
            elif now != before:
                # one that is deleted or damaged here stays as it is there
                with contextlib.suppress(FileNotFoundError, CheckpointError):
                    manifest = read_manifest(checkpoint)
                    if manifest.files == contents.complete[checkpoint.name].files:
                        contents.update_manifest(checkpoint.name, manifest)
                    self._uploaded[checkpoint] = now

    def _failed(self, error: BaseException, sent_before: int) -> None:
        self._why = why(error)
        self._contents = None  # another process may complete what is left, until the next try
        self._failures += 1
        name = shortened(self.missing, 1) or "How the run has ended"
        if self._failures == 1:
            logger.warning("%s was not uploaded to %s: %s; it is tried again.", name, self._remote.url, self._why)
        with self._lock:
            dropped = self._current if self._waiting is not None and self._throttle.moved == sent_before else None
            if dropped is not None:
                self._current, self._waiting = self._waiting, None
        if dropped is not None:
            self._drop(dropped, "it made no progress, and a newer one was saved")

    def _pause(self) -> None:
        seconds = min(2.0 ** (self._failures - 1), _LONGEST_PAUSE_S)
        if self._ending.is_set():
            time.sleep(min(seconds, 2.0))
        else:
            self._ending.wait(seconds)

    def _drop(self, held: Held, reason: str) -> None:
        held.release()
        logger.info("%s is not uploaded to %s: %s.", held.name, self._remote.url, reason)
