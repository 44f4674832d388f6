"""Sinks: they write what is new in ``state.metrics`` to a file or a console, on rank 0.

A sink is anything with ``write(iteration, values)``. An error in a sink is logged once by its :class:`GuardedSink` and
never stops the training.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import ignite.distributed as idist

from ignite_engine import Phase, Trainer, TrainingEvents
from ignite_engine.checkpoint.lock import InUse, lock
from ignite_engine.handlers.columns import Columns, head_of, short, width_of
from ignite_engine.text import json_values

Values = Mapping[str, Any]
LINES_OF_A_TABLE = 40
_START = "{:>7}  {:>5}"
logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Anything that writes values: ``iteration`` counts updates, ``values`` are by name and include ``epoch``."""

    def write(self, iteration: int, values: Values) -> None: ...


def attach_sink(sink: Any, trainer: Trainer) -> None:
    """Make ``sink`` write what is new at each METRICS_READY; a sink with its own ``attach`` subscribes itself."""
    attach = getattr(sink, "attach", None)
    if attach is not None:
        attach(trainer)
    else:
        GuardedSink(sink).attach(trainer)


class GuardedSink:
    """Subscribes one sink to the bus; an error of it is a warning with the remedy, and training continues.

    Later points are still written, so a sink whose disk has room again recovers. The state of a sink with a ``name`` is
    in every checkpoint; a sink whose ``state_dict`` fails is saved without one.
    """

    phase = Phase.LOG

    def __init__(self, sink: Any) -> None:
        self.sink = sink
        self.__qualname__ = f"{type(sink).__name__}.write"  # the name in describe()
        self._failing: set[str] = set()
        """What has failed when it was tried last, which was said."""

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self)
        name = getattr(self.sink, "name", None)
        if hasattr(self.sink, "state_dict") and isinstance(name, str):
            trainer.register(name, SinkState(self), kind="log")

    def __call__(self, trainer: Trainer) -> None:
        state = trainer.state
        self.guard(self.sink.write)(state.iteration, {"epoch": state.epoch, **state.metrics.fresh})

    def guard(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """``action``, except that an error is logged (of several one after another the first) and None is returned."""
        known = getattr(action, "__name__", "")

        def attempt(*arguments: Any) -> Any:
            try:
                result = action(*arguments)
                self._failing.discard(known)
                return result
            except Exception as error:  # a lost log point must not lose the training
                if not self._failing:
                    self._failing.add(known)
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
        self.flush_to_disk = guarded.guard(getattr(sink, "flush_to_disk", lambda: None))

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


class LogFile:
    """Lines of text, one per iteration, for a sink; the newest may be written again.

    While it is open, no other process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = 0
        """Offset of the newest line in bytes."""
        self._file: IO[bytes] | None = None
        self._lock = contextlib.ExitStack()
        self._complete = True
        self._in_use = False

    def open(self) -> IO[bytes]:
        """The file, which is made if there is none.

        Raises:
            FileInUse: another process writes it; from then on, this one never does.
        """
        if self._in_use:
            raise FileInUse(self.path)
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            file = self.path.open("r+b")
            try:
                self._lock.enter_context(lock(self.path, again=True))
            except InUse:
                file.close()
                self._in_use = True
                raise FileInUse(self.path) from None
            self._file = file
        return self._file

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def drop_from(self, iteration: float) -> None:
        """Remove the lines from ``iteration`` on, which this run writes again, and an incomplete last line."""
        file = self.open()
        kept = file.seek(0)
        for line in file:
            if not line.endswith(b"\n") or _iteration_of(line) >= iteration:
                break
            kept += len(line)
        file.truncate(kept)

    def begin_line(self) -> None:
        """The next :meth:`write` adds a line; one that a failed write has torn is replaced by it."""
        if self._complete:
            self.start = self.open().seek(0, os.SEEK_END)

    def write(self, line: bytes) -> None:
        """Write the newest line, again if it is there."""
        file = self.open()
        self._complete = False
        file.seek(self.start)
        file.write(line)
        file.truncate()
        file.flush()
        self._complete = True

    def sync(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._lock.close()


class JSONLSink:
    """One JSON object per iteration, floats in full precision.

    A run that is resumed, or started again in the same folder, truncates the file first, so that no iteration appears
    twice.

    Args:
        path: the file; its folder is created. Values written later for the newest iteration are added to its line.
        name: in checkpoints.

    NaN and infinities, which JSON does not have, are written as strings. While it is open, no other process writes it.

    Raises:
        FileInUse: (when writing or loading) another process writes the file; from then on, this one never does.
    """

    def __init__(self, path: str | Path, *, name: str = "jsonl") -> None:
        self.path, self.name = Path(path).absolute(), name
        self._file = LogFile(self.path)
        self._line: dict[str, Any] = {}

    def write(self, iteration: int, values: Values) -> None:
        """Write a line, or add to the newest one if it has the same iteration; rank 0 only."""
        if idist.get_rank() != 0:
            return
        file = self._file
        if (not file.is_open and not self._line) or iteration < self._line.get("iteration", 0):
            file.drop_from(iteration)
            self._line = {}
        if self._line.get("iteration") != iteration:
            file.begin_line()
            self._line = {"iteration": iteration}
        self._line |= {name: _json_value(value) for name, value in values.items()}
        file.write(self._encoded())

    def state_dict(self) -> dict[str, Any]:
        """The newest line and its offset in bytes."""
        return {"start": self._file.start, "line": dict(self._line)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remove what was written after the checkpoint."""
        if idist.get_rank() != 0:
            return
        self._line, self._file.start = dict(state["line"]), state["start"]
        if self._line:
            end = self._file.open().seek(0, os.SEEK_END)
            self._file.start = min(self._file.start, end)  # a shorter file: leave no hole
            self._file.write(self._encoded())
        elif self.path.exists():
            self._file.open().truncate(self._file.start)

    def flush_to_disk(self) -> None:
        """Before a checkpoint is saved: all lines before the newest are durable."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _encoded(self) -> bytes:
        ordered: dict[str, Any] = {key: self._line[key] for key in ("iteration", "epoch") if key in self._line}
        ordered |= {key: self._line[key] for key in sorted(self._line) if key not in ordered}
        return json.dumps(ordered).encode() + b"\n"


class ConsoleSink:
    """A table on rank 0's standard output: one aligned line per log point, as wide as the terminal, elsewhere 80.

    A heading is printed first, again when the columns change (the first evaluation adds its metrics), and after 40
    lines. ``-`` is a value that was not written at this log point; a log point with none of the columns prints nothing.
    The line of the last step boundary is printed when the run has ended, with what was logged at its end.

    Args:
        stream: None: ``sys.stdout`` at the time of writing.
        keys: which values of ``state.metrics``, in which order, after iteration and epoch; patterns (``val/*``) too,
            and ``rate`` for the throughput. None: ``loss``, the update's other values, metrics of evaluations, ``lr``
            and the throughput, of these as many as fit.
    """

    name = "console"

    def __init__(self, stream: IO[str] | None = None, *, keys: Sequence[str] | None = None) -> None:
        self.stream, self.columns = stream, Columns(keys)
        self._heading, self._lines = "", 0
        self._trainer: Trainer | None = None
        self._held: dict[str, Any] = {}
        self._print_at_end: Callable[[int], Any] = self._print_held

    def attach(self, trainer: Trainer) -> None:
        guarded = GuardedSink(self)
        guarded.phase = Phase.LAST  # after the handlers that may end the run, whose last line has more values
        guarded.attach(trainer)
        self._trainer, self._print_at_end = trainer, guarded.guard(self._print_held)

    def write(self, iteration: int, values: Values) -> None:
        if idist.get_rank() != 0:
            return
        trainer = self._trainer
        if trainer is not None and (trainer.state.last or trainer.should_terminate):
            if not self._held:
                trainer.call_at_end(lambda trainer: self._print_at_end(iteration))
            self._held |= values
        else:
            self._print(iteration, values)

    def _print_held(self, iteration: int) -> None:
        values, self._held = self._held, {}
        self._print(iteration, values)

    def _print(self, iteration: int, values: Values) -> None:
        stream = self.stream or sys.stdout
        self.columns.add(values)
        keys = self.columns.fitting(_columns_of(stream) - len(_START.format("", "")))
        if not any(key in values for key in keys):
            return
        heading = _START.format("iter", "epoch") + "".join(f"  {head_of(key):>{width_of(key)}}" for key in keys)
        if heading != self._heading or self._lines >= LINES_OF_A_TABLE:
            self._heading, self._lines = heading, 0
            print(heading, file=stream)
        self._lines += 1
        cells = (short(values[key], key) if key in values else "-" for key in keys)
        line = "".join(f"  {cell:>{width_of(key)}}" for key, cell in zip(keys, cells, strict=True))
        print(_START.format(iteration, values.get("epoch", "-")) + line, file=stream, flush=True)


def _columns_of(stream: IO[str]) -> int:
    """Characters in a line of the terminal behind ``stream``; 80 if there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):  # no terminal, no file, closed
        return 80


def _iteration_of(line: bytes) -> float:
    """The iteration of a line; infinity if the line is not one of ours."""
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json_value(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return json_values(value)
