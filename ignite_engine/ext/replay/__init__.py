"""Any moment of a run again, as the same run in another folder; and what follows from that."""

from ignite_engine.ext.replay.audit import Audit, Segment, audit
from ignite_engine.ext.replay.compare import Comparison, Difference, RunComparison, compare_runs, first_difference
from ignite_engine.ext.replay.rerun import Build, rerun

__all__ = [
    "Audit",
    "Build",
    "Comparison",
    "Difference",
    "RunComparison",
    "Segment",
    "audit",
    "compare_runs",
    "first_difference",
    "rerun",
]
