"""Where the time of a run went, over all its starts, and why it was not faster; pure functions of what was measured."""

from __future__ import annotations

from ignite_engine.report.goodput.ledger import PARTS, Ledger, LedgerFile, goodput_line, read_ledger
from ignite_engine.report.goodput.verdict import Figures, Growth, Verdict, no_cause, verdict

__all__ = [
    "PARTS",
    "Figures",
    "Growth",
    "Ledger",
    "LedgerFile",
    "Verdict",
    "goodput_line",
    "no_cause",
    "read_ledger",
    "verdict",
]
