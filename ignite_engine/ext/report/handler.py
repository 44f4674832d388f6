"""Writes the page of a run at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ignite.engine import Engine

from ignite_engine.ext.report.pages import write_report


class Report:
    """Writes the page with the curves of a run into its folder when the run has ended.

    Args:
        run: whose page it is; :class:`ignite_engine.runs.run.Run`.
    """

    def __init__(self, run: Any) -> None:
        self.run = run

    def attach(self, engine: Engine) -> None:
        self.run.write_report = self._write

    def _write(self) -> Path:
        return write_report(self.run.directory.path)
