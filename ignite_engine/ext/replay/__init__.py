"""Any moment of a run again, as the same run in another folder; and what follows from that."""

from ignite_engine.ext.replay.audit import audit as audit
from ignite_engine.ext.replay.compare import compare as compare
from ignite_engine.ext.replay.compare import compare_runs as compare_runs
from ignite_engine.ext.replay.rerun import rerun as rerun
