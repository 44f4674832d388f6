"""The process that reads a run's folder and sends to each tracker what it lacks; it imports no torch by itself.

Beside each tracker lie ``NAME.json``, what it has kept, and ``NAME.sent``: iteration and digest of each line that it
has. A line with another digest (a roll-back, a resume that went another way) is where it begins anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint.lock import InUse, lock
from ignite_engine.handlers.trackers.tracker import DONE, FOLDER, RUN, Tracker, is_running, read, write

POLL_S, MOST_PAUSE_S, WAIT_S, END_WITHIN_S = 0.25, 60.0, 600.0, 600.0
ROWS = 500
_RECORD = struct.Struct("<q8s")
_Line = tuple[int, bytes, dict[str, Any]]
"""Where a line of the log begins, the line, and what it holds."""
KILLED = {"status": "failed", "reason": "the training process ended without reporting a status; it was probably killed"}


def follow(directory: Path, *, wait_s: float = 0.0) -> dict[str, str]:
    """Send what the trackers of a run lack until it has ended.

    Args:
        wait_s: how long another process that does so is waited for.

    Returns:
        What failed, by tracker.

    Raises:
        FileNotFoundError: no tracker was attached to the run.
        InUse: another process sends, and says who.
    """
    folder = directory / FOLDER
    if not read(folder / RUN):
        raise FileNotFoundError(f"{directory} has no trackers: it holds no {FOLDER}/{RUN}, which a tracker writes.")
    with lock(folder / "lock", own_file=True, wait_s=wait_s):
        run = _Run(directory)
        feeds: dict[str, _Feed] = {}
        while True:
            has_ended = run.outcome() is not None
            trackers = read(folder / RUN)["trackers"] if run.is_current() else {}
            for name in trackers.keys() - feeds.keys():
                feeds[name] = _Feed(run, name, trackers[name])
                feeds[name].start()
            if has_ended:
                break
            time.sleep(POLL_S)
        until = time.monotonic() + END_WITHIN_S
        for feed in feeds.values():
            feed.join(max(until - time.monotonic(), 0.0))
            if feed.is_alive():
                feed.problem = f"it does not answer, after {END_WITHIN_S:g} s"
        problems = {name: feed.problem for name, feed in feeds.items() if feed.problem is not None}
        write(folder / DONE, {"token": run.token, "problems": problems})
    return problems


class _Run:
    """What a start of a run has written into its folder."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.folder = directory, directory / FOLDER
        self.values = read(self.folder / RUN)
        self.token = self.values["token"]

    def is_current(self) -> bool:
        return bool(read(self.folder / RUN).get("token") == self.token)

    def outcome(self) -> Mapping[str, Any] | None:
        """How it ended; None while it goes on."""
        now = read(self.folder / RUN)
        if now.get("token") != self.token:  # a later start has its own process, which waits for this one
            return KILLED
        if now["status"] != "running":
            return {"status": now["status"], "reason": now["reason"]}
        return None if is_running(now["writer"]) else KILLED


class _Feed(threading.Thread):
    """Sends to one tracker, in a thread of its own: one that hangs holds up no other."""

    def __init__(self, run: _Run, name: str, made_of: Mapping[str, Any]) -> None:
        super().__init__(name=name, daemon=True)
        self.problem: str | None = None
        self._of_run, self._made_of = run, made_of
        self._log, self._sent = run.directory / "metrics.jsonl", run.folder / f"{name}.sent"
        self._kept = run.folder / f"{name}.json"
        self._forget()

    def run(self) -> None:
        pause, next_at = POLL_S, 0.0
        while True:
            outcome = self._of_run.outcome()  # before the log is read to its end
            if outcome is None and time.monotonic() < next_at:
                time.sleep(POLL_S)
                continue
            try:
                self._send(outcome)
                self.problem, pause = None, POLL_S
            except Exception as error:  # it is tried again, and said at the end
                traceback.print_exc()
                self.problem, pause = f"{type(error).__name__}: {error}", min(4 * pause, MOST_PAUSE_S)
                self._forget()
            if outcome is not None:
                return
            next_at = time.monotonic() + pause

    def _forget(self) -> None:
        """Begin anew with what is in the files."""
        self._tracker: Tracker | None = None
        self._at, self._line = 0, b""
        """The newest line that was sent, and where it begins."""
        self._known, self._same = b"", 0
        """Records of the lines that were sent, and how much of that is known to be as it was."""

    def _send(self, outcome: Mapping[str, Any] | None) -> None:
        told = None if outcome is None else {**outcome, "token": self._of_run.token}
        while True:
            lines, is_rewound = self._unsent(whole=outcome is not None)
            if self._tracker is None and not lines and (told is None or read(self._kept).get("told") == told):
                return
            if self._tracker is None or is_rewound:
                self._tracker = self._begun(self._tracker or self._made(), lines)
            if not lines:
                break
            self._push(self._tracker, lines)
        if outcome is not None:
            self._tracker.end(outcome)
            self._keep(told=told)

    def _unsent(self, *, whole: bool) -> tuple[list[_Line], bool]:
        """The next lines that the tracker lacks, and whether it has some that are out of date.

        Args:
            whole: the newest line grows no more.
        """
        lines: list[_Line] = []
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(self._at)
            if file.readline() != self._line:  # cut, or written anew
                self._at, self._line, self._same = 0, b"", 0
                self._known = self._sent.read_bytes() if self._sent.exists() else b""
                file.seek(0)
            at = file.tell()
            while len(lines) <= ROWS and (line := file.readline()).endswith(b"\n"):
                if (row := _row_of(line)) is not None:
                    record = _record(line, row)
                    if not lines and self._known.startswith(record, self._same):
                        self._same += len(record)
                        self._at, self._line = at, line
                    else:
                        lines.append((at, line, row))
                at += len(line)
        if not whole or len(lines) > ROWS:
            del lines[-1:]
        is_rewound = self._same < len(self._known) and (whole or bool(lines))
        if is_rewound:
            os.truncate(self._sent, self._same)
            self._known = self._known[: self._same]
        return lines, is_rewound

    def _begun(self, tracker: Tracker, lines: Sequence[_Line]) -> Tracker:
        kept = read(self._kept)
        last = _RECORD.unpack(self._known[-_RECORD.size :])[0] if self._known else 0
        if not last and not tracker.takes_again:  # nothing of the log is as it was: a record of its own
            kept = {}
        tracker.begin(lines[0][2]["iteration"] if lines else last + 1, kept, self._of_run.values)
        write(self._kept, kept)
        return tracker

    def _push(self, tracker: Tracker, lines: Sequence[_Line]) -> None:
        held = 0 if tracker.takes_again else read(self._kept).get("held", 0)
        if rows := [row for _, _, row in lines if row["iteration"] > held]:
            tracker.push(rows)
        records = b"".join(_record(line, row) for _, line, row in lines)
        with self._sent.open("ab") as file:
            file.write(records)
        self._known, self._same = records, len(records)
        self._at, self._line, row = lines[-1]
        if not tracker.takes_again:
            self._keep(held=max(held, row["iteration"]))

    def _keep(self, **values: Any) -> None:
        write(self._kept, {**read(self._kept), **values})

    def _made(self) -> Tracker:
        path, module, qualified = self._made_of["class"]
        sys.path.extend(each for each in self._of_run.values["path"] if each not in sys.path)
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError:  # it was loaded by its path
            spec = importlib.util.spec_from_file_location(module, path)
            assert spec is not None and spec.loader is not None
            found = sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        tracker: Tracker = attrgetter(qualified)(found)(self._of_run.directory, **self._made_of["settings"])
        return tracker


def _row_of(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("iteration"), int):
            return row
    return None


def _record(line: bytes, row: Mapping[str, Any]) -> bytes:
    return _RECORD.pack(row["iteration"], hashlib.blake2b(line, digest_size=8).digest())


def main() -> None:
    """What training starts: deaf to the signals that stop it, and it yields to it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    try:
        problems = follow(Path(sys.argv[1]), wait_s=WAIT_S)
    except InUse as holder:
        problems = {"all": f"{holder} still sends"}
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(bool(problems)))  # a tracker that hangs holds its thread, and libraries their hooks


if __name__ == "__main__":
    main()
