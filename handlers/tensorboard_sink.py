"""Values as TensorBoard scalars, written by the training thread itself: no queue, no second thread."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ignite.distributed as idist
from ignite.engine import Events

from ignite_engine import Trainer
from ignite_engine.handlers.sinks import GuardedSink, Values, number_of


class TensorBoardSink:
    """A sink for ``tensorboard --logdir``: one event file per start or resume of the run.

    Args:
        directory: of the run; the files lie in its ``tensorboard`` folder.
        name: in checkpoints, which hold the last iteration of each series. The event file of a resumed run starts with
            a session mark that makes TensorBoard drop the points after the checkpoint, so that none appears twice.

    The package tensorboard is imported at the first value; without it, ``attach`` logs a warning.
    torch.utils.tensorboard is not used: its background thread raises errors late. Rank 0 only.
    """

    def __init__(self, directory: str | Path, *, name: str = "tensorboard") -> None:
        self.folder, self.name = Path(directory) / "tensorboard", name
        self._written: dict[str, int] = {}
        self._writer: Any = None
        self._file: Path | None = None
        self._points = 0

    def attach(self, trainer: Trainer) -> None:
        """Write what is new at each METRICS_READY; the file is closed when the run ends for any reason."""
        guarded = GuardedSink(self)
        guarded.attach(trainer)
        if idist.get_rank() == 0:
            guarded.guard(_require_tensorboard)()

        def start(trainer: Trainer) -> None:
            if trainer.starts_fresh(self.name):
                self._written = {}
            trainer.call_at_end(guarded.guard(lambda trainer: self.close()))

        trainer.add_event_handler(Events.STARTED, start)

    def write(self, iteration: int, values: Values) -> None:
        """Write the numbers among ``values``; rank 0 only.

        Raises:
            ModuleNotFoundError: tensorboard is not installed.
        """
        numbers = {name: number_of(value) for name, value in values.items()}
        new = {
            name: number
            for name, number in numbers.items()
            if number is not None and iteration > self._written.get(name, -1)
        }
        if not new or idist.get_rank() != 0:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=number) for name, number in new.items()]
        try:
            if self._writer is None:
                self._open()
            self._add(step=iteration, summary=Summary(value=points))
            self._writer.flush()
        except OSError:
            self._abandon_file()
            raise
        self._points += len(new)
        self._written |= dict.fromkeys(new, iteration)

    def state_dict(self) -> dict[str, Any]:
        """The last iteration of each series."""
        return {"written": dict(self._written)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start a new event file, whose session mark makes TensorBoard drop the points after the saved state."""
        self.close()
        self._written = dict(state["written"])

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _abandon_file(self) -> None:
        """TensorBoard stops reading at a torn record, so the next point goes into a new file."""
        with contextlib.suppress(OSError):  # closing flushes the buffer, and the disk is full
            self.close()
        if self._file is not None and not self._points:
            self._file.unlink(missing_ok=True)

    def _open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)  # TensorBoard reads the files in the order of their names
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file, self._points = self.folder / name, 0
        self._writer = RecordWriter(self._file.open("wb"))
        self._add(file_version="brain.Event:2")
        self._add(step=max(self._written.values(), default=-1) + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())


def _require_tensorboard() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")
