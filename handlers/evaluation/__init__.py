"""Evaluate while training, and keep how far a long evaluation has come."""

from ignite_engine.handlers.evaluation.handler import Evaluation

__all__ = ["Evaluation"]
