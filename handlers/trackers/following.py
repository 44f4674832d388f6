"""The process that reads a run's folder and sends to a tracker what it lacks; it imports no torch by itself.

Of a tracker there are ``NAME.start.json``, what training has written; ``NAME.json``, what it has kept; and
``NAME.sent``: iteration and digest of each line that it has. A line with another digest (a roll-back, a resume that
went another way) is where it begins anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint.lock import lock
from ignite_engine.handlers.trackers.tracker import FOLDER, START, Tracker, write_object
from ignite_engine.text import METRICS, objects_in, read_object

POLL_S, MOST_PAUSE_S, WAIT_S, END_WITHIN_S = 0.25, 60.0, 600.0, 600
ROWS = 500
_RECORD = struct.Struct("<q8s")
_Line = tuple[int, bytes, dict[str, Any]]
"""Where a line of the log begins, the line, and what it holds."""
KILLED = {"status": "failed", "reason": "the training process ended without reporting a status; it was probably killed"}


def track(directory: Path) -> dict[str, str]:
    """Send what the trackers of a run that has ended lack.

    Returns:
        What failed, by tracker.

    Raises:
        FileNotFoundError: no tracker was attached to the run.
        InUse: another process sends, and says who.
    """
    names = sorted(path.name.removesuffix(START) for path in (directory / FOLDER).glob(f"*{START}"))
    if not names:
        raise FileNotFoundError(
            f"{directory} has no trackers: it holds no {FOLDER}/NAME{START}, which a tracker writes."
        )
    problems = {name: _Sender(directory, name).send() for name in names}
    return {name: problem for name, problem in problems.items() if problem is not None}


class _Sender:
    """Sends to one tracker of a run.

    Args:
        trainer: the number of the process that trains, and has started this one; None: the run has ended.
    """

    def __init__(self, directory: Path, name: str, trainer: int | None = None) -> None:
        folder = directory / FOLDER
        self._directory, self._trainer, self._log = directory, trainer, directory / METRICS
        self._start, self._kept, self._sent = (folder / f"{name}{end}" for end in (START, ".json", ".sent"))
        self._lock = folder / f"{name}.lock"

    def send(self, *, wait_s: float = 0.0) -> str | None:
        """Send until the run has ended.

        Args:
            wait_s: how long another process that does so is waited for.

        Returns:
            What has failed in the end.
        """
        with lock(self._lock, own_file=True, wait_s=wait_s):
            pause, problem = POLL_S, None
            self._forget()
            while True:
                outcome = self._outcome()  # before the log is read to its end
                try:
                    self._send(outcome)
                    pause, problem = POLL_S, None
                except Exception as error:  # it is tried again, and said at the end
                    traceback.print_exc()
                    pause, problem = min(4 * pause, MOST_PAUSE_S), f"{type(error).__name__}: {error}"
                    self._forget()
                if outcome is not None:
                    self._keep(problem=problem)
                    return problem
                until = time.monotonic() + pause
                while time.monotonic() < until and self._outcome() is None:
                    time.sleep(POLL_S)

    def _outcome(self) -> Mapping[str, Any] | None:
        """How the run has ended; None while it goes on."""
        goes_on = self._trainer is not None and os.getppid() == self._trainer
        outcome = read_object(self._start).get("outcome") or (None if goes_on else KILLED)
        if outcome is not None and self._trainer is not None:
            signal.alarm(END_WITHIN_S)  # which ends it: a tracker may hang
        return outcome

    def _forget(self) -> None:
        """Begin anew with what is in the files."""
        self._tracker: Tracker | None = None
        self._records = self._sent.read_bytes() if self._sent.exists() else b""
        """Of the lines that were sent, of which so many bytes are known to be as they were."""
        self._same = 0
        self._at, self._newest = 0, b""
        """Where the newest of these lines begins, and the line."""

    def _send(self, outcome: Mapping[str, Any] | None) -> None:
        while True:
            lines, is_rewound = self._unsent(whole=outcome is not None)
            if self._tracker is None and not lines and outcome in (None, read_object(self._kept).get("told")):
                return
            if self._tracker is None or is_rewound:
                self._tracker = self._begun(self._tracker or self._made(), lines)
            if not lines:
                break
            self._push(self._tracker, lines)
        if outcome is not None:
            self._tracker.end(outcome)
            self._keep(told=outcome)

    def _unsent(self, *, whole: bool) -> tuple[list[_Line], bool]:
        """The next lines that the tracker lacks, and whether it has had some that are out of date.

        Args:
            whole: the newest line grows no more.
        """
        lines: list[_Line] = []
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(self._at)
            if file.readline() != self._newest:  # cut, or written anew
                self._same, self._at, self._newest = 0, file.seek(0), b""
            while len(lines) <= ROWS and (line := file.readline()).endswith(b"\n"):
                at = file.tell() - len(line)
                for row in objects_in([line]):
                    if not lines and self._records.startswith(record := _record(line, row), self._same):
                        self._same += len(record)
                        self._at, self._newest = at, line
                    else:
                        lines.append((at, line, row))
        if not whole or len(lines) > ROWS:
            del lines[-1:]
        is_rewound = self._same < len(self._records) and (whole or bool(lines))
        if is_rewound:
            os.truncate(self._sent, self._same)
            self._records = self._records[: self._same]
        return lines, is_rewound

    def _begun(self, tracker: Tracker, lines: Sequence[_Line]) -> Tracker:
        kept = read_object(self._kept)
        last = _RECORD.unpack(self._records[-_RECORD.size :])[0] if self._records else 0
        if not last and not tracker.takes_again:  # nothing of the log is as it was: a record of its own
            kept = {}
        tracker.begin(lines[0][2]["iteration"] if lines else last + 1, kept, read_object(self._start))
        write_object(self._kept, kept)
        return tracker

    def _push(self, tracker: Tracker, lines: Sequence[_Line]) -> None:
        held = 0 if tracker.takes_again else read_object(self._kept).get("held", 0)
        if rows := [row for _, _, row in lines if row["iteration"] > held]:
            tracker.push(rows)
        records = b"".join(_record(line, row) for _, line, row in lines)
        with self._sent.open("ab") as file:
            file.write(records)
        self._records += records
        self._same = len(self._records)
        self._at, self._newest, row = lines[-1]
        if not tracker.takes_again:
            self._keep(held=max(held, row["iteration"]))

    def _keep(self, **values: Any) -> None:
        write_object(self._kept, {**read_object(self._kept), **values})

    def _made(self) -> Tracker:
        start = read_object(self._start)
        path, module, qualified = start["class"]
        sys.path.extend(each for each in start["path"] if each not in sys.path)
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError:  # it was loaded by its path
            spec = importlib.util.spec_from_file_location(module, path)
            assert spec is not None and spec.loader is not None
            found = sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        tracker: Tracker = attrgetter(qualified)(found)(self._directory, **start["settings"])
        return tracker


def _record(line: bytes, row: Mapping[str, Any]) -> bytes:
    return _RECORD.pack(row["iteration"], hashlib.blake2b(line, digest_size=8).digest())


def main() -> None:
    """What training starts: deaf to the signals that stop it, and it yields to it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    directory, name, trainer = sys.argv[1:]
    problem = _Sender(Path(directory), name, int(trainer)).send(wait_s=WAIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(problem is not None))  # libraries have hooks and threads that wait


if __name__ == "__main__":
    main()
