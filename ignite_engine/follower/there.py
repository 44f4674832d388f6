"""A run on another machine, of which only the mirror is reached: what is evaluated is fetched from there."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ignite_engine.checkpointing import CheckpointInfo
from ignite_engine.checkpointing.layout import discard, scan
from ignite_engine.checkpointing.manifest import MANIFEST_NAME
from ignite_engine.checkpointing.retention import of_one_run
from ignite_engine.errors import CheckpointError
from ignite_engine.followed_log import FollowedLog, identity_of, missing_values
from ignite_engine.follower.life import Life, is_begun
from ignite_engine.mirror.bring import ANSWERS_WITHIN_S, fetch_together
from ignite_engine.mirror.followed import (
    BEAT_S,
    FOLLOWER,
    MEASURED,
    RUN,
    Pulse,
    measured_lines,
    names_in,
    read_note,
    without_left,
    write_note,
    writer_of,
)
from ignite_engine.mirror.remote import Remote, Torn, why
from ignite_engine.mirror.waiting import Unreachable, patiently, together
from ignite_engine.ranks import agreement
from ignite_engine.run_directory import RunDirectory, RunDirectoryInUse

logger = logging.getLogger(__name__)
T = TypeVar("T")
_TRIES = 10
"""Tries to fetch a checkpoint of a mirror that answers, until it is left out."""


class There:
    """Reaches a run by its mirror, with the methods of :class:`ignite_engine.follower.here.Here`.

    Checkpoints are fetched into ``follow/checkpoints`` of a folder on this machine. What the run and its follower tell
    each other is in :mod:`ignite_engine.mirror.followed`. While the run lives it alone writes manifests in the mirror;
    when it has ended, the follower adds what it has measured since.

    Args:
        run: the folder on this machine.
        wait_s: seconds without a sign of life after which the run is given up.
    """

    look_every_s = BEAT_S

    def __init__(self, remote: Remote, run: RunDirectory, wait_s: float, parallel: int = 4) -> None:
        self._remote, self._parallel = remote, parallel
        self.run = run
        self._fetched = run.followed.parent / "checkpoints"
        self._log = FollowedLog(run.followed)
        self._holds: list[str] = []
        self._me = writer_of(run.path)
        self._pulse_of_run = Pulse()
        self._has_joined = self._has_given_up = False
        self._not_fetched: Counter[str] = Counter()
        self._count, self._writing = 0, threading.Lock()
        self._over = threading.Event()
        self._is_unreachable = False
        self.life = LifeThere(remote, wait_s)

    def __str__(self) -> str:
        return self._remote.url

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        try:
            answers = together(lambda _: question() if agreement.rank() == 0 else otherwise, ANSWERS_WITHIN_S)
        except Unreachable as reason:
            self._is_gone(reason)
            return otherwise
        self._is_unreachable = False
        return answers[0]

    def _is_gone(self, reason: Unreachable) -> None:
        if not self._is_unreachable and agreement.rank() == 0:
            logger.warning("%s cannot be read: %s; it is asked again.", self, str(reason).rstrip("."))
        self._is_unreachable = True

    def saved(self) -> list[CheckpointInfo]:
        note = read_note(self._remote, RUN)  # first: what has left by now is not listed
        lives = self._pulse_of_run.beats(note)  # one that was killed deletes nothing
        leaving = names_in(note.get("leaving")) if lives else []
        return [checkpoint for checkpoint in self._remote.checkpoints()[0] if checkpoint.path.name not in leaving]

    def hold(self, checkpoint: CheckpointInfo) -> bool:
        name = checkpoint.path.name
        if name in self._holds:
            return True
        self._holds.append(name)
        is_there = False
        try:
            self._sign()
            is_there = identity_of(checkpoint) in map(identity_of, self.saved())
        finally:
            if not is_there:
                self._holds.remove(name)
        return is_there

    def name_of(self, checkpoint: CheckpointInfo) -> str:
        return f"{self}/{checkpoint.path.name}"

    def bring(self, checkpoint: CheckpointInfo) -> Path | None:
        path = self._fetched / checkpoint.path.name
        self.ask(lambda: self._discard_others(path.name), None)
        try:
            fetch_together(self._remote, self._fetched, path.name, self._parallel)
        except Torn as torn:
            raise CheckpointError(f"{torn}.") from None
        except Unreachable as reason:
            self._is_gone(reason)
            self._not_fetched[path.name] += 1
            if self._not_fetched[path.name] == _TRIES:  # all else there was read in between
                raise CheckpointError(f"it was not fetched in {_TRIES} tries: {str(reason).rstrip('.')}.") from None
            time.sleep(self.look_every_s)
            return None
        del self._not_fetched[path.name]
        return path

    def _discard_others(self, name: str) -> None:
        """Discard fetched checkpoints that are fetched again, or that the mirror no longer has with the same files."""
        there = {saved.path.name: saved.manifest.files for saved in self.saved()} | {name: {}}
        fetched = scan(self._fetched)[0]
        discard([found.path for found in fetched if there.get(found.path.name) != found.manifest.files])

    def measured(self, checkpoint: CheckpointInfo, values: Mapping[str, float]) -> None:
        self._insist(self._write_log)  # the checkpoint is held until its values are there

    def _insist(self, action: Callable[[], object]) -> None:
        """Do it, again where the mirror is not reached, for a minute at most, unless it is given up; a collective."""
        deadline = time.monotonic() + min(self.life.wait_s, ANSWERS_WITHIN_S)
        while self.ask(lambda: [action()], None) is None:
            if self._has_given_up or agreement.on_rank_0(lambda: time.monotonic() >= deadline):
                self._has_given_up = True
                return
            time.sleep(self.look_every_s)
        self._has_given_up = False

    def _write_log(self) -> None:
        """Leave what was measured, with what another follower has left."""
        if not self._has_joined and (saved := of_one_run(self.saved())):
            self._log.join(measured_lines(self._remote), saved[-1].manifest.run_id, without_left(saved))
            self._has_joined = True
        if self._has_joined:
            self._remote.write(MEASURED, self._log.text())

    def let_go(self, checkpoint: CheckpointInfo) -> None:
        if agreement.rank() == 0:
            name = checkpoint.path.name
            if name in self._holds:
                self._holds.remove(name)
            discard([fetched.path for fetched in scan(self._fetched)[0] if fetched.path.name != name])

    def begin(self, log: FollowedLog) -> None:
        """Refuse a second follower, and take what one on another machine has measured; a collective.

        Raises:
            RunDirectoryInUse: another one lives.
        """
        if holder := self.ask(self._other, None):
            raise RunDirectoryInUse(f"{self} is followed by {holder}: one is enough; stop it to start another.")
        self._insist(self._take_over)
        if agreement.rank() == 0:
            threading.Thread(target=self._beat, name="follower", daemon=True).start()

    def _other(self) -> str | None:
        """Another follower that lives: its count goes on."""
        first = read_note(self._remote, FOLLOWER)
        if not first or first.get("where") == self._me["where"]:  # this folder's follower is dead, as its lock is ours
            return None
        deadline = time.monotonic() + 3 * BEAT_S
        while time.monotonic() < deadline:
            now = read_note(self._remote, FOLLOWER)
            if now != first:
                return str(now.get("who", "another process")) if now else None
            time.sleep(BEAT_S / 5)
        return None

    def _take_over(self) -> None:
        self._write_log()
        self._sign()  # last: with this note the run lets go of what a follower before this one has held

    def _sign(self) -> None:
        with self._writing:
            if self._over.is_set():
                return
            self._count += 1
            write_note(self._remote, FOLLOWER, {**self._me, "holds": list(self._holds), "count": self._count})

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(Exception):  # of the store, which what asks it next names
                self._sign()

    def end(self) -> None:
        """Add to the mirror what its run has not, which has ended; a collective."""
        self._insist(self._add_to_manifests)

    def _add_to_manifests(self) -> None:
        self._write_log()
        lines = self._log.lines()
        for checkpoint in self.saved():
            if values := missing_values(checkpoint, lines):
                manifest = replace(checkpoint.manifest, metrics={**checkpoint.manifest.metrics, **values})
                self._remote.write(f"{checkpoint.path.name}/{MANIFEST_NAME}", manifest.to_json())

    def release(self) -> None:
        self._over.set()
        if self._count:  # on rank 0, unless another follower was found
            with contextlib.suppress(Unreachable):  # a note that is left is one of the dead
                patiently(lambda _: self._remove_note(), BEAT_S)

    def _remove_note(self) -> None:
        self._write_log()  # it may have been stopped before that
        with self._writing:
            self._remote.delete_file(FOLLOWER)


class LifeThere(Life):
    """As its mirror shows."""

    def __init__(self, remote: Remote, wait_s: float) -> None:
        super().__init__(wait_s)
        self._remote = remote

    def _look(self) -> object:
        note = read_note(self._remote, RUN)
        self._notice((note, self._remote.names()))
        return note.get("status")


def begins_there(run: RunDirectory, remote: Remote, wait_s: float) -> bool:
    """Wait until there is a run in the folder, or else in the mirror; a collective.

    Raises:
        CheckpointError: one line; the mirror could not be read when the wait was over.
    """

    def look() -> bool:
        deadline = time.monotonic() + wait_s
        failure, has_failed = None, False
        while True:
            if is_begun(run):
                return False
            try:
                if read_note(remote, RUN) or remote.names():
                    return True
                failure = None
            except Exception as error:  # a store may raise anything
                if not has_failed:
                    logger.warning("%s cannot be read: %s; it is asked again.", remote.url, why(error))
                failure, has_failed = error, True
            if time.monotonic() > deadline:
                if failure is not None:
                    raise failure
                return False
            time.sleep(0.5)

    try:
        return together(lambda _: look() if agreement.rank() == 0 else False, wait_s + ANSWERS_WITHIN_S)[0]
    except Unreachable as reason:
        raise CheckpointError(f"{remote.url} cannot be read: {str(reason).rstrip('.')}.") from None
