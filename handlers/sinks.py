"""Sinks: they write what is new in ``state.metrics`` to a file or a console, on rank 0.

A sink is anything with ``write(iteration, values)``. An error in a sink is logged once by its :class:`GuardedSink` and
never stops the training.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import ignite.distributed as idist

from ignite_engine import Phase, Trainer, TrainingEvents
from ignite_engine.checkpointing.manifest import json_number

Values = Mapping[str, Any]
logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Anything that writes values: ``iteration`` counts updates, ``values`` are by name and include ``epoch``."""

    def write(self, iteration: int, values: Values) -> None: ...


def attach_sink(sink: Sink, trainer: Trainer) -> None:
    """Make ``sink`` write what is new at each METRICS_READY; a sink with its own ``attach`` subscribes itself."""
    attach = getattr(sink, "attach", None)
    if attach is not None:
        attach(trainer)
    else:
        GuardedSink(sink).attach(trainer)


class GuardedSink:
    """Subscribes one sink to the bus; its first error is a warning with the remedy, and training continues.

    Later points are still written, so a sink whose disk has room again recovers. The state of a sink with a ``name`` is
    in every checkpoint; a sink whose ``state_dict`` fails is saved without one.
    """

    phase = Phase.LOG

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.__qualname__ = f"{type(sink).__name__}.write"  # the name in describe()
        self._warned = False

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self)
        name = getattr(self.sink, "name", None)
        if hasattr(self.sink, "state_dict") and isinstance(name, str):
            trainer.register(name, SinkState(self))

    def __call__(self, trainer: Trainer) -> None:
        iteration, values = trainer.state.iteration, {"epoch": trainer.state.epoch, **trainer.state.metrics.fresh}
        self.guard(self.sink.write)(iteration, values)

    def guard(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """``action``, except that an error is logged (the first one only) and None is returned."""

        def attempt(*arguments: Any) -> Any:
            try:
                return action(*arguments)
            except Exception as error:  # a lost log point must not lose the training
                if not self._warned:
                    self._warned = True
                    named = getattr(self.sink, "name", None)
                    logger.warning(
                        "The sink %s failed: %s: %s. Training continues and later points are tried; %s.",
                        f"{named} ({type(self.sink).__name__})" if named else type(self.sink).__name__,
                        type(error).__name__,
                        str(error).rstrip("."),
                        _remedy(error),
                    )
                return None

        return attempt


class SinkState:
    """A sink's state in a checkpoint; None if its ``state_dict`` failed."""

    belongs_to_its_run = True
    """Not loaded when a run starts from parts of another run's checkpoint: it has its own logs."""

    def __init__(self, guarded: GuardedSink) -> None:
        sink: Any = guarded.sink
        self._save, self._load = guarded.guard(sink.state_dict), guarded.guard(sink.load_state_dict)

    def state_dict(self) -> Any:
        return self._save()

    def load_state_dict(self, state: Any) -> None:
        if state is not None:
            self._load(state)


def _remedy(error: Exception) -> str:
    if isinstance(error, FileInUse):
        return "give this run a directory of its own"
    if isinstance(error, ImportError):
        return f"install {(error.name or 'the missing package').partition('.')[0]}, or remove the sink"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some disk space"
    if isinstance(error, OSError):
        return "make the path writable, or remove the sink"
    return "fix the error, or remove the sink"


class FileInUse(RuntimeError):
    """Another process writes the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is being written by another process")


class JSONLSink:
    """One JSON object per iteration, floats in full precision.

    A run that is resumed, or started again in the same folder, truncates the file first, so that no iteration appears
    twice.

    Args:
        path: the file; its folder is created. Values written later for the newest iteration are added to its line.
        name: in checkpoints.

    NaN and infinities, which JSON does not have, are written as strings. A file that is deleted or replaced while the
    run writes it is started again, with a warning. While it is open, no other process writes it.

    Raises:
        FileInUse: (when writing or loading) another process writes the file; from then on, this one never does.
    """

    def __init__(self, path: str | Path, *, name: str = "jsonl") -> None:
        self.path, self.name = Path(path), name
        self._file: IO[bytes] | None = None
        self._line: dict[str, Any] = {}
        self._line_start = 0
        self._line_complete = True
        self._in_use = False

    def write(self, iteration: int, values: Values) -> None:
        """Write a line, or add to the newest one if it has the same iteration; rank 0 only."""
        if idist.get_rank() != 0:
            return
        if self._file is not None and not self._is_still(self._file):
            logger.warning(
                "%s was deleted or replaced while the run was writing it: it continues in a new file, without the "
                "lines before iteration %d.",
                self.path,
                iteration,
            )
            self.close()
            self._line, self._line_start = {}, 0
        first_write = self._file is None and not self._line
        file = self._open()
        if first_write or iteration < self._line.get("iteration", 0):
            _truncate_from(file, iteration)
            self._line = {}
        if self._line.get("iteration") != iteration:
            if self._line_complete:  # else the new line replaces the torn one
                self._line_start = file.seek(0, os.SEEK_END)
            self._line = {"iteration": iteration}
        self._line |= {name: _json_value(value) for name, value in values.items()}
        self._write_line(file)

    def state_dict(self) -> dict[str, Any]:
        """The newest line and its offset in bytes; all lines before it are on disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"start": self._line_start, "line": dict(self._line)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remove what was written after the checkpoint."""
        if idist.get_rank() != 0:
            return
        self._line, self._line_start = dict(state["line"]), state["start"]
        if self._line:
            file = self._open()
            self._line_start = min(self._line_start, file.seek(0, os.SEEK_END))  # a shorter file: leave no hole
            self._write_line(file)
        elif self.path.exists():
            self._open().truncate(self._line_start)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        if self._in_use:
            raise FileInUse(self.path)
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            file = self.path.open("r+b")
            try:
                # the process's own lock: with flock a loader worker that outlives a killed run would still hold it
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.close()
                self._in_use = True
                raise FileInUse(self.path) from None
            except OSError:
                pass  # a file system without locks
            self._file = file
        return self._file

    def _is_still(self, file: IO[bytes]) -> bool:
        """Whether ``file`` is what is at the path."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _write_line(self, file: IO[bytes]) -> None:
        ordered: dict[str, Any] = {key: self._line[key] for key in ("iteration", "epoch") if key in self._line}
        ordered |= {key: self._line[key] for key in sorted(self._line) if key not in ordered}
        self._line_complete = False
        file.seek(self._line_start)
        file.write(json.dumps(ordered).encode() + b"\n")
        file.truncate()
        file.flush()
        self._line_complete = True


class ConsoleSink:
    """One readable line per log point on rank 0's standard output; names without a ``/`` come first.

    Args:
        stream: None: ``sys.stdout`` at the time of writing.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = stream

    def write(self, iteration: int, values: Values) -> None:
        if idist.get_rank() != 0:
            return
        words = [
            f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in sorted(values.items(), key=_is_grouped)
        ]
        print(f"iteration {iteration}", *words, sep="  ", file=self.stream or sys.stdout, flush=True)


def _truncate_from(file: IO[bytes], iteration: int) -> None:
    """Remove the lines from ``iteration`` on, which this run writes again, and an incomplete last line."""
    kept = file.seek(0)
    for line in file:
        if not line.endswith(b"\n") or _iteration_of(line) >= iteration:
            break
        kept += len(line)
    file.truncate(kept)


def _iteration_of(line: bytes) -> float:
    """The iteration of a line; infinity if the line is not one of ours."""
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _is_grouped(item: tuple[str, Any]) -> bool:
    return "/" in item[0]


def number_of(value: Any) -> float | None:
    """``value`` as a float, None if it is not a number."""
    if hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _json_value(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return json_number(value) if isinstance(value, float) else value
