"""Evaluation beside a run: another process evaluates each checkpoint while the run continues."""

from ignite_engine.ext.follow.follow import follow as follow
