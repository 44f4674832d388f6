"""What a run leaves in its mirror for a follower on another machine, and for another run: files beside the checkpoints.

``follow/run.json`` is written by the run alone: who it is, its status, and the checkpoints that it is about to delete.
``follow/follower.json`` is written by the follower alone: the checkpoints that it holds. Each writes its note before it
reads the other's, so that none is evaluated that is being deleted. Both have a count that goes on while their writer
lives, which a reader judges by its own clock. ``follow/metrics.jsonl`` is the follower's log, which is written before
the note that lets a checkpoint go.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing import CheckpointError, CheckpointInfo, CheckpointStore
from ignite_engine.checkpointing.filesystem import is_held
from ignite_engine.checkpointing.in_use import in_use
from ignite_engine.checkpointing.layout import named_iteration
from ignite_engine.checkpointing.manifest import read_manifest
from ignite_engine.checkpointing.retention import of_one_run
from ignite_engine.followed_log import FollowedLog, Line, lines_in, missing_values
from ignite_engine.mirror.remote import Remote

logger = logging.getLogger(__name__)
RUN, FOLLOWER, MEASURED = "follow/run.json", "follow/follower.json", "follow/metrics.jsonl"
BEAT_S = 5.0
"""Seconds between two counts of a follower, and between two looks of a run for them."""
_BEATS_OF_A_RUN = 4
"""Beats of ``BEAT_S`` between two counts of a run without a follower."""
_ALIVE_S = 60.0
"""Without a new count for so long, its writer is taken for dead."""


def read_note(remote: Remote, name: str) -> dict[str, Any]:
    """What the run or the follower has written last; empty if it has not, or if it cannot be read as JSON."""
    try:
        values = json.loads(remote.read(name))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def write_note(remote: Remote, name: str, values: Mapping[str, Any]) -> None:
    """Leave what :func:`read_note` reads."""
    remote.write(name, json.dumps(values).encode())


def measured_lines(remote: Remote) -> list[Line]:
    """What followers have measured, by iteration."""
    try:
        return lines_in(remote.read(MEASURED))
    except FileNotFoundError:
        return []


def writer_of(directory: Path) -> dict[str, str]:
    """Who writes a note: this process, for people, and the folder of its run, in which no other one runs."""
    node = platform.node()
    return {"who": f"process {os.getpid()} on {node}", "where": f"{node}:{directory.resolve()}"}


class Pulse:
    """Whether the writer of a note lives, by the clock of the reader."""

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}
        self._changed_at = -_ALIVE_S

    def beats(self, note: Mapping[str, Any]) -> bool:
        """Whether a note, as it is now, has changed lately; the first look at one counts as a change."""
        if note != self._last:
            self._last, self._changed_at = note, time.monotonic()
        return bool(note) and time.monotonic() - self._changed_at < _ALIVE_S


class RunNotes:
    """The side of the run: says how it is, and takes what was measured, in the thread that uploads.

    A mirror is that of the run that was there first, as long as that one lives: another one writes nothing.

    Args:
        directory: of the run's checkpoints.
    """

    def __init__(self, remote: Remote, directory: Path) -> None:
        self.remote = remote
        self.status: str | None = None
        """The status of the run, written at the next look; None: the run has not begun."""
        self.lines: list[Line] = []
        """What was measured."""
        self.held: list[str] = []
        """Names of the checkpoints that are evaluated now."""
        self._leaving: list[str] = []
        """Names of those that are about to be deleted."""
        self.directory = directory
        self._me = writer_of(directory)
        self._pulse, self._pulse_of_another_run, self._count = Pulse(), Pulse(), 0
        self._lives: object = None
        """Where another run was seen to count on."""
        self._signing, self._over = threading.Lock(), threading.Event()
        self._written: str | None = None
        self._follower: dict[str, Any] | None = None
        """Its note when its values were taken last."""
        self._has_failed = False
        self._kept: dict[str, contextlib.ExitStack] = {}

    def begin(self) -> None:
        """The run trains from now on, of which a thread gives signs."""
        self.status, self._written = "running", None
        self._over.set()
        self._over = threading.Event()
        threading.Thread(target=self._beat, args=(self._over,), name="mirror", daemon=True).start()

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(_BEATS_OF_A_RUN * BEAT_S):
            with contextlib.suppress(Exception):  # of the store, which the next upload names
                self._sign()

    def _sign(self) -> None:
        with self._signing:
            if self._another_run() is None:
                self._count, status = self._count + 1, self.status
                note = {**self._me, "status": status, "count": self._count, "leaving": self._leaving}
                write_note(self.remote, RUN, note)
                self._written = status

    def _another_run(self) -> dict[str, Any] | None:
        """The note of one that trains, until it is known to be dead."""
        note = read_note(self.remote, RUN)
        trains = note.get("status") == "running" and note.get("where") not in (None, self._me["where"])
        return note if trains and self._pulse_of_another_run.beats(note) else None

    def check_alone(self) -> None:
        """Wait until it is known whether another run that lives has this mirror.

        Raises:
            CheckpointError: one line; it has.
        """
        first = self._another_run()
        while (now := self._another_run()) is not None:
            if now != first or now.get("where") == self._lives:
                who, self._lives = now.get("who"), now.get("where")
                raise CheckpointError(f"it is the mirror of another run, {who}, which trains; give each run its own")
            time.sleep(BEAT_S / 5)

    def look(self) -> None:
        """Exchange what there is; of a run that nobody follows one small file is looked for.

        What a store raises leaves it as it is.
        """
        self._leaving = []
        is_followed = self._hear(whatever_was_said=self.status != self._written)
        if self.status is not None and (is_followed or self.status != self._written):
            self._sign()

    def has_said(self, status: str) -> bool:
        """Whether that is what the mirror holds, unless another run has said something since."""
        return self._written == status

    def say(self, status: str) -> None:
        """Say how the run is now; what a store raises leaves it as it is."""
        self.status = status
        self._sign()

    def leave(self, names: Sequence[str]) -> None:
        """Say what is about to be deleted, so that no follower takes it before the next look; hear what one has."""
        self._leaving = [*names]
        if self.status is not None:
            self._sign()
        self._hear(whatever_was_said=True)

    def _hear(self, *, whatever_was_said: bool) -> bool:
        """Learn what a follower holds and has measured; whether one lives.

        Args:
            whatever_was_said: read its log though its note is that of the last time; a follower that has come and gone,
                or was killed after it wrote the log, has left none.
        """
        follower = read_note(self.remote, FOLLOWER)
        is_followed = self._pulse.beats(follower)
        self.held = names_in(follower.get("holds")) if is_followed else []
        if follower == self._follower and not whatever_was_said and self._kept.keys() <= set(self.held):
            self._keep(self.held)
            return is_followed
        self._keep({*self._kept, *self.held})  # what it has let go stays until its values are here
        self.lines = measured_lines(self.remote)
        try:
            take(self.lines, self.directory)
        except (OSError, CheckpointError) as error:  # of the disk here; the mirror keeps the values
            if not self._has_failed:
                logger.warning("What was measured of %s could not be written here: %s.", self.directory, error)
            self._has_failed = True
            return is_followed
        self._follower, self._has_failed = follower, False
        self._keep(self.held)
        return is_followed

    def close(self) -> None:
        """Give no more signs, and let retention delete what was held."""
        self._over.set()
        self._keep([])

    def _keep(self, names: Collection[str]) -> None:
        """Keep the folder's retention from deleting what is evaluated elsewhere."""
        for name in [*self._kept.keys() - names]:
            self._kept.pop(name).close()
        for name in names:
            if name not in self._kept:
                with contextlib.ExitStack() as stack:
                    if stack.enter_context(in_use(self.directory / name)):
                        self._kept[name] = stack.pop_all()


def take(lines: Iterable[Line], directory: Path) -> int:
    """Put what was measured elsewhere into a run's log and into the manifests of its checkpoints.

    Args:
        directory: of the checkpoints.

    Returns:
        Of how many checkpoints there were new values.

    Raises:
        OSError, CheckpointError: they could not be written.
    """
    store, lines = CheckpointStore(directory), list(lines)
    if not lines or not (checkpoints := of_one_run(store.checkpoints())):
        return 0
    log = FollowedLog.beside(directory)
    known, failed = log.checkpoints(), None
    if not is_held(log.path.parent):  # a follower on this machine writes the file
        log.join(lines, checkpoints[-1].manifest.run_id, without_left(checkpoints))
    for checkpoint in checkpoints:
        with in_use(checkpoint.path) as is_there:
            try:
                now = CheckpointInfo(checkpoint.path, read_manifest(checkpoint.path)) if is_there else checkpoint
                if is_there and (values := missing_values(now, lines)):
                    store.add_metrics(checkpoint.path, values)
            except CheckpointError as error:
                if checkpoint.path.exists():  # else it was deleted meanwhile
                    failed = error
    if failed is not None:
        raise failed
    return sum(identity not in known for identity in log.checkpoints())


def without_left(saved: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Those of one run, in the order in which it has saved them, without iterations that it has left.

    It has left those after an earlier one that it has saved since: it was resumed before them.
    """
    earliest_since, current = math.inf, list[CheckpointInfo]()
    for checkpoint in reversed(saved):
        if checkpoint.iteration < earliest_since:
            current.append(checkpoint)
        earliest_since = min(earliest_since, checkpoint.iteration)
    return current[::-1]


def names_in(value: object) -> list[str]:
    """The names of checkpoints in a note."""
    return [name for name in value if _is_name(name)] if isinstance(value, list) else []


def _is_name(value: object) -> bool:
    return isinstance(value, str) and "/" not in value and named_iteration(Path(value)) is not None
