"""Where values end: sinks take what is new in ``state.metrics`` and write it, on rank 0.

A sink is anything with ``write(iteration, values)``. Those here may be used by other handlers of ours; they know none.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import ignite.distributed as idist

Values = Mapping[str, Any]


class Sink(Protocol):
    """What takes values: ``iteration`` in updates, values by name (``epoch`` among them)."""

    def write(self, iteration: int, values: Values) -> None: ...


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

    def write(self, iteration: int, values: Values) -> None:
        """Write a line, or add to the newest one if it has the same iteration; rank 0 only."""
        if idist.get_rank() != 0:
            return
        if self._file is None and not self._line:
            self._cut_back(iteration)
        file = self._open()
        same = self._line.get("iteration") == iteration
        if not same:
            self._line, self._line_start = {"iteration": iteration}, file.seek(0, os.SEEK_END)
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
        file.seek(self._line_start)
        file.write(json.dumps(ordered).encode() + b"\n")
        file.truncate()
        file.flush()


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


def _json_value(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
