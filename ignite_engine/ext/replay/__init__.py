"""Any moment of a run again, from its checkpoints and its config; and what follows from that."""

from ignite_engine.ext.replay.compare import RunComparison, compare_runs
from ignite_engine.ext.replay.logged import Difference
from ignite_engine.ext.replay.moment import Moment, RunDiffers, bring_to, replay
from ignite_engine.ext.replay.rebuild import Build
from ignite_engine.ext.replay.segments import Audit, Segment, audit

__all__ = [
    "Audit",
    "Build",
    "Difference",
    "Moment",
    "RunComparison",
    "RunDiffers",
    "Segment",
    "audit",
    "bring_to",
    "compare_runs",
    "replay",
]
