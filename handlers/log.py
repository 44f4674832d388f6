"""A log: a file of JSON lines, one for each iteration, which a resumed run continues where its checkpoint was."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from ignite_engine.checkpoint.lock import InUse, lock
from ignite_engine.ranks import agreement
from ignite_engine.text import json_values

logger = logging.getLogger(__name__)


class Log:
    """Rows of one file, ``iteration`` among their values; floats in full precision.

    Args:
        path: the file; its folder is created.

    A row of the newest iteration is added to its line. A row of an earlier one begins the log anew from there, as the
    first of a process does, so that no iteration appears twice. NaN and infinities, which JSON does not have, are
    written as strings. Rank 0 writes, and meanwhile no other process does. An error of the file is a warning, later
    rows are tried, and training continues.
    """

    belongs_to_its_run = True
    """Not loaded when a run starts from parts of another run's checkpoint: it has its own log."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._line: dict[str, Any] = {}
        """The newest line, from ``_start`` to ``_end`` in the file."""
        self._start = self._end = 0
        self._file: IO[bytes] | None = None
        self._lock = contextlib.ExitStack()
        self._failing = self._is_in_use = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a line, or add to the newest one if it has the same iteration."""
        self._attempt(lambda: self._write(row))

    def state_dict(self) -> dict[str, Any]:
        """The newest line."""
        return {"line": dict(self._line)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remove what was written after the checkpoint."""
        if self._line or state["line"] or self.path.exists():
            self._attempt(lambda: self._continue_from(state["line"]))

    def flush_to_disk(self) -> None:
        """Before a checkpoint is saved: what was written is durable."""
        if (file := self._file) is not None:
            self._attempt(lambda: os.fsync(file.fileno()))

    def close(self) -> None:
        """Let other processes write it."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._lock.close()

    def _attempt(self, action: Callable[[], object]) -> None:
        if agreement.rank() != 0:
            return
        try:
            action()
        except OSError as error:  # a lost line must not lose the training
            if not self._failing:
                self._failing = True
                logger.warning("%s is not written: %s. Training continues and later lines are tried.", self.path, error)

    def _write(self, row: Mapping[str, Any]) -> None:
        file, iteration, newest = self._opened(), row["iteration"], self._line.get("iteration", -math.inf)
        if iteration < newest or not self._line:
            self._cut(iteration)
        line = {**(self._line if iteration == newest else {}), **json_values(row)}
        at = self._start if iteration == newest else self._end  # over what a failed write has torn
        file.seek(at)
        file.write(_encoded(line))
        file.truncate()
        file.flush()
        self._line, self._start, self._end = line, at, file.tell()
        self._failing = False

    def _continue_from(self, line: Mapping[str, Any]) -> None:
        self._opened()
        self._cut(line.get("iteration", -math.inf))
        if line:
            self._write(line)

    def _opened(self) -> IO[bytes]:
        """The file, which is made if there is none."""
        if self._is_in_use:
            raise InUse("another process has written it; give this run a directory of its own")
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            try:
                self._lock.enter_context(lock(self.path, again=True))
            except InUse:
                self._is_in_use = True
                raise InUse("another process writes it; give this run a directory of its own") from None
            self._file = self.path.open("r+b")
        return self._file

    def _cut(self, iteration: float) -> None:
        """Remove the lines from ``iteration`` on, and an incomplete last one."""
        file = self._opened()
        file.seek(0)
        self._line, self._start, self._end = {}, 0, length_before(file, iteration)
        file.truncate(self._end)


def length_before(lines: Iterable[bytes], iteration: float) -> int:
    """Bytes of the lines before that of ``iteration``, or one that is torn."""
    length = 0
    for line in lines:
        try:
            if not line.endswith(b"\n") or json.loads(line)["iteration"] >= iteration:
                break
        except (ValueError, KeyError, TypeError):
            break
        length += len(line)
    return length


def _encoded(line: Mapping[str, Any]) -> bytes:
    first = {key: line[key] for key in ("iteration", "epoch") if key in line}
    return json.dumps({**first, **{key: line[key] for key in sorted(line.keys() - first.keys())}}).encode() + b"\n"
