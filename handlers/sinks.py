"""Where values end: sinks take what is new in ``state.metrics`` and write it, on rank 0.

A sink is anything with ``write(iteration, values)``. Those here may be used by other handlers of ours; they know none.
What fails in a sink is told once by its :class:`Outlet` and never stops the training.
"""

from __future__ import annotations

import errno
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

Values = Mapping[str, Any]
logger = logging.getLogger(__name__)


class Sink(Protocol):
    """What takes values: ``iteration`` in updates, values by name (``epoch`` among them)."""

    def write(self, iteration: int, values: Values) -> None: ...


def attach_sink(sink: Sink, trainer: Trainer) -> None:
    """Let ``sink`` write what is new at each METRICS_READY; one with an ``attach`` of its own sees to that itself."""
    attach = getattr(sink, "attach", None)
    if attach is not None:
        attach(trainer)
    else:
        Outlet(sink).attach(trainer)


class Outlet:
    """The way from the bus to one sink. The first error is a warning with what to do about it, and training goes on.

    Later points are tried all the same, so a sink whose disk has room again writes again. The state of a sink with a
    ``name`` is in every checkpoint; one that cannot tell its state is saved without.
    """

    phase = Phase.LOG

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.__qualname__ = f"{type(sink).__name__}.write"  # what describe() shows
        self._told = False

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self)
        name = getattr(self.sink, "name", None)
        if hasattr(self.sink, "state_dict") and isinstance(name, str):
            trainer.register(name, SinkState(self))

    def __call__(self, trainer: Trainer) -> None:
        iteration, values = trainer.state.iteration, {"epoch": trainer.state.epoch, **trainer.state.metrics.fresh}
        self.guarded(self.sink.write)(iteration, values)

    def guarded(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """``action``, which may fail: then it is told, if it is the first failure, and None is returned."""

        def attempt(*arguments: Any) -> Any:
            try:
                return action(*arguments)
            except Exception as error:  # a log is no reason to lose a training
                if not self._told:
                    self._told = True
                    named = getattr(self.sink, "name", None)
                    logger.warning(
                        "The sink %s failed: %s: %s. Training goes on, and later points are tried; %s.",
                        f"{named} ({type(self.sink).__name__})" if named else type(self.sink).__name__,
                        type(error).__name__,
                        str(error).rstrip("."),
                        _remedy(error),
                    )
                return None

        return attempt


class SinkState:
    """A sink's state in a checkpoint; None where the sink could not tell it."""

    belongs_to_its_run = True
    """A run that begins with parts of another one's checkpoint keeps logs of its own."""

    def __init__(self, outlet: Outlet) -> None:
        sink: Any = outlet.sink
        self._save, self._load = outlet.guarded(sink.state_dict), outlet.guarded(sink.load_state_dict)

    def state_dict(self) -> Any:
        return self._save()

    def load_state_dict(self, state: Any) -> None:
        if state is not None:
            self._load(state)


def _remedy(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"install {(error.name or 'what is missing').partition('.')[0]}, or leave the sink out"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room there"
    if isinstance(error, OSError):
        return "make the place writable, or leave the sink out"
    return "mend what it names, or leave the sink out"


class JSONLSink:
    """One JSON object per iteration, floats in full; a run that is resumed or begun again cuts the file back.

    So no iteration stands twice.

    Args:
        path: the file; its folder is made. Values written later for the newest iteration join its line.
        name: in checkpoints.

    Numbers that JSON does not know (NaN, infinities) are written as strings.
    """

    def __init__(self, path: str | Path, *, name: str = "jsonl") -> None:
        self.path, self.name = Path(path), name
        self._file: IO[bytes] | None = None
        self._line: dict[str, Any] = {}
        self._line_start = 0
        self._is_whole = True

    def write(self, iteration: int, values: Values) -> None:
        """Write a line, or add to the newest one if it has the same iteration; rank 0 only."""
        if idist.get_rank() != 0:
            return
        begins_again = self._file is None and not self._line
        if begins_again or iteration < self._line.get("iteration", 0):
            self.close()
            self._cut_back(iteration)
            self._line = {}
        file = self._open()
        if self._line.get("iteration") != iteration:
            if self._is_whole:  # else the new line takes the place of the torn one
                self._line_start = file.seek(0, os.SEEK_END)
            self._line = {"iteration": iteration}
        self._line |= {name: _json_value(value) for name, value in values.items()}
        self._write_line(file)

    def state_dict(self) -> dict[str, Any]:
        """The newest line and where it begins; what came before it is on disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"start": self._line_start, "line": dict(self._line)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut off what was written after the checkpoint."""
        if idist.get_rank() != 0:
            return
        self._line, self._line_start = dict(state["line"]), state["start"]
        if self._line:
            file = self._open()
            self._line_start = min(self._line_start, file.seek(0, os.SEEK_END))  # another file: no hole in it
            self._write_line(file)
        elif self.path.exists():
            self._open().truncate(self._line_start)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            self._file = self.path.open("r+b")
        return self._file

    def _cut_back(self, iteration: int) -> None:
        """Cut off what a run that is begun again has written from ``iteration`` on, and a line it did not end."""
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            kept = 0
            for line in file:
                if not line.endswith(b"\n") or _iteration_of(line) >= iteration:
                    break
                kept += len(line)
            file.truncate(kept)

    def _write_line(self, file: IO[bytes]) -> None:
        ordered: dict[str, Any] = {key: self._line[key] for key in ("iteration", "epoch") if key in self._line}
        ordered |= {key: self._line[key] for key in sorted(self._line) if key not in ordered}
        self._is_whole = False
        file.seek(self._line_start)
        file.write(json.dumps(ordered).encode() + b"\n")
        file.truncate()
        file.flush()
        self._is_whole = True


class ConsoleSink:
    """One readable line per log point on rank 0's standard output: the loss and its like before ``group/name``.

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


def _iteration_of(line: bytes) -> float:
    """Of one of our lines; infinity for what is none."""
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _is_grouped(item: tuple[str, Any]) -> bool:
    return "/" in item[0]


def number_of(value: Any) -> float | None:
    """``value`` as a float, None if it is no number."""
    if hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _json_value(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
