"""Any moment of a run again, as the same run in another folder; and what follows from that."""

from ignite_engine.ext.replay.audit import audit
from ignite_engine.ext.replay.compare import compare_runs, first_difference
from ignite_engine.ext.replay.rerun import rerun

__all__ = ["audit", "compare_runs", "first_difference", "rerun"]
