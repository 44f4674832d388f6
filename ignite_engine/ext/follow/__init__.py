"""Evaluation beside a run: each checkpoint that it saves is evaluated by another process, while it trains on."""

from ignite_engine.ext.follow.follow import follow as follow
