"""TensorBoard: an event file for each start, by torch's own writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ignite_engine.handlers.trackers.tracker import Row, Tracker, hyperparameters, numbers


class TensorBoard(Tracker):
    """Writes what is logged for ``tensorboard --logdir``, into the run's ``tensorboard`` folder.

    Args:
        directory: of the run.
        config: shown as a text, and as hyperparameters by its dotted keys.
        name: of its files in ``directory/trackers``.

    Each start has an event file, whose first record makes TensorBoard drop the points that come again.
    """

    extra = "tensorboard"

    def __init__(
        self, directory: str | Path, *, config: Mapping[str, Any] | None = None, name: str = "tensorboard"
    ) -> None:
        super().__init__(directory, name=name)
        self.config = config
        self._writer: Any = None

    def begin(self, first: int, kept: dict[str, Any], run: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        if self._writer is not None:
            self._writer.close()
        self._writer = SummaryWriter(str(self.directory / "tensorboard"), purge_step=first)
        if self.config:
            text = yaml.safe_dump(dict(self.config), sort_keys=False, allow_unicode=True)
            self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), first)
            for summary in hparams(hyperparameters(self.config), {}):
                self._writer.file_writer.add_summary(summary)

    def push(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, number in numbers(row).items():
                self._writer.add_scalar(name, number, row["iteration"])
        self._writer.flush()

    def end(self, outcome: Mapping[str, Any]) -> None:
        self._writer.close()
