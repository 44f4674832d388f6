"""One HTML page that shows a run, or several over one another; made from the files of run directories alone.

A page is one file without any link: it opens from disk, with its curves as SVG and its hover as a few lines of script.
"""

from __future__ import annotations

from ignite_engine.report.pages import write_comparison, write_report
from ignite_engine.report.records import NotARun, Record, read_run

__all__ = ["NotARun", "Record", "read_run", "write_comparison", "write_report"]
