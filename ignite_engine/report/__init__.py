"""One HTML page with the curves of a run, or of several compared; made from the files of run directories alone.

A page is one file that loads nothing else: it opens from disk, with the curves as SVG and a short script for hovering.
"""

from __future__ import annotations

from ignite_engine.report.pages import write_comparison, write_report
from ignite_engine.report.records import NotARun, Record, read_run
from ignite_engine.report.sweep import NotLogged, ordered, sweep_table

__all__ = [
    "NotARun",
    "NotLogged",
    "Record",
    "ordered",
    "read_run",
    "sweep_table",
    "write_comparison",
    "write_report",
]
