"""Values and config for TensorBoard, written by the training thread itself: no queue, no second thread."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import yaml
from ignite.engine import Events

from ignite_engine import Trainer
from ignite_engine.handlers.sinks import GuardedSink, Values, new_numbers, require, settings_of


class TensorBoardSink:
    """A sink for ``tensorboard --logdir``: one event file per start or resume of the run.

    Args:
        directory: of the run; the files lie in its ``tensorboard`` folder.
        config: shown as a text, and as hyperparameters by its dotted keys.
        name: in checkpoints, which hold the last iteration of each series. The event file of a resumed run starts with
            a session mark that makes TensorBoard drop the points after the checkpoint, so that none appears twice.

    The package tensorboard is imported at the first value; without it, ``attach`` logs a warning.
    torch.utils.tensorboard is not used: its background thread raises errors late. Rank 0 only.
    """

    def __init__(
        self, directory: str | Path, *, config: Mapping[str, Any] | None = None, name: str = "tensorboard"
    ) -> None:
        self.folder, self.config, self.name = Path(directory).absolute() / "tensorboard", config, name
        self._written: dict[str, int] = {}
        self._writer: Any = None
        self._file: Path | None = None
        self._points = 0

    def attach(self, trainer: Trainer) -> None:
        """Write what is new at each METRICS_READY; the file is closed when the run ends for any reason."""
        guarded = GuardedSink(self)
        guarded.attach(trainer)
        if idist.get_rank() == 0:
            guarded.guard(require)("tensorboard")

        def start(trainer: Trainer) -> None:
            trainer.call_at_end(guarded.guard(lambda trainer: self.close()))

        trainer.add_event_handler(Events.STARTED, start)

    def begin_anew(self) -> None:
        """A run starts over: nothing was written."""
        self._written = {}

    def write(self, iteration: int, values: Values) -> None:
        """Write the numbers among ``values``; rank 0 only.

        Raises:
            ModuleNotFoundError: tensorboard is not installed.
        """
        new = new_numbers(iteration, values, self._written)
        if not new or idist.get_rank() != 0:
            return
        self._report(iteration, new)

    def _report(self, iteration: int, points: Mapping[str, float]) -> None:
        """Write one event."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        try:
            if self._writer is None:
                self._open()
            values = [Summary.Value(tag=name, simple_value=number) for name, number in points.items()]
            self._add(step=iteration, summary=Summary(value=values))
            self._writer.flush()
        except OSError:
            self._abandon_file()
            raise
        self._points += len(points)
        self._written |= dict.fromkeys(points, iteration)

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
        step = max(self._written.values(), default=-1) + 1
        self._add(step=step, session_log=SessionLog(status=SessionLog.START))
        if self.config is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb

            text = yaml.safe_dump(dict(self.config), sort_keys=False, allow_unicode=True)
            shown = Summary.Value(
                tag="config", **_text_fields("config", "".join(f"    {line}\n" for line in text.splitlines()))
            )
            self._add(step=step, summary=Summary(value=[shown]))
            self._add(summary=hparams_pb(settings_of(self.config)))

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())


def _text_fields(name: str, text: str) -> dict[str, Any]:
    """The fields of a value that the text plugin shows, as Markdown."""
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    return {"tensor": tensor, "metadata": create_summary_metadata(display_name=name, description="")}
