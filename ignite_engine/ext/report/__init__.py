"""One HTML page with the curves of a run, or of several runs compared; made from the files in the runs' folders.

A page is one file that loads nothing else: it opens from disk, and a script in it draws the curves.
"""

from ignite_engine.ext.report.pages import write_comparison, write_report
from ignite_engine.ext.report.records import NotARun, Record, read_run, runs_in

__all__ = ["NotARun", "Record", "read_run", "runs_in", "write_comparison", "write_report"]
