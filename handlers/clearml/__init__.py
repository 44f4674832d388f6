"""Log to ClearML, offline in the run's folder or online where a server is configured."""

from ignite_engine.handlers.clearml.sink import ClearMLLogger

__all__ = ["ClearMLLogger"]
