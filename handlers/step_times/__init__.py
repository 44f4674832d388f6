"""The parts of a step's time, the ledger of a run's time, and why it was not faster."""

from ignite_engine.handlers.step_times.handler import StepTimes

__all__ = ["StepTimes"]
