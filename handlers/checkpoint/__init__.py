"""Save at an event, at the end and on a stop; resume from the newest valid checkpoint."""

from ignite_engine.handlers.checkpoint.handler import Checkpoint

__all__ = ["Checkpoint"]
