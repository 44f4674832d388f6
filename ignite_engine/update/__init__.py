"""Updates: one optimizer step per iteration, or several in turn."""

from ignite_engine.update.accumulation import Accumulation
from ignite_engine.update.base import BaseUpdate
from ignite_engine.update.in_turn import Updates
from ignite_engine.update.one import Update

__all__ = ["Accumulation", "BaseUpdate", "Update", "Updates"]
