"""One HTML page with the curves of a run, or of several compared; made from the files of run directories alone.

A page is one file that loads nothing else: it opens from disk, with the curves as SVG and a short script for hovering.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ignite_engine.ext.report.pages import write_comparison, write_report
    from ignite_engine.ext.report.records import NotARun, Record, read_run, runs_in

__all__ = [
    "NotARun",
    "Record",
    "read_run",
    "runs_in",
    "write_comparison",
    "write_report",
]

_MODULES = {
    "NotARun": "ignite_engine.ext.report.records",
    "Record": "ignite_engine.ext.report.records",
    "read_run": "ignite_engine.ext.report.records",
    "runs_in": "ignite_engine.ext.report.records",
    "write_comparison": "ignite_engine.ext.report.pages",
    "write_report": "ignite_engine.ext.report.pages",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
