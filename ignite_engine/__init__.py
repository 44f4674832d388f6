"""An event-bus training engine on PyTorch-Ignite: exact resume, agreed stops, little overhead."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ignite_engine.data import Windows, loader
from ignite_engine.engine.intervals import every
from ignite_engine.errors import Interrupted, StopRequested
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.ranks.launch import Parallel
from ignite_engine.rng import seed_everything
from ignite_engine.state import Start, TrainingState
from ignite_engine.step.micro_batches import Group, accumulation_steps_for, gradient_sync
from ignite_engine.task import Task
from ignite_engine.trainer import Trainer, create_evaluator
from ignite_engine.update import Update, Updates

if TYPE_CHECKING:
    from ignite_engine.runs.fit import fit
    from ignite_engine.runs.load_model import load_model, load_weights

__all__ = [
    "Group",
    "Interrupted",
    "Parallel",
    "Phase",
    "Start",
    "StopRequested",
    "Task",
    "Trainer",
    "TrainingEvents",
    "TrainingState",
    "Update",
    "Updates",
    "Windows",
    "accumulation_steps_for",
    "create_evaluator",
    "every",
    "fit",
    "gradient_sync",
    "load_model",
    "load_weights",
    "loader",
    "seed_everything",
]
__version__ = "0.1.0"


_LATER = {"fit": "runs.fit", "load_model": "runs.load_model", "load_weights": "runs.load_model"}


def __getattr__(name: str) -> Any:
    if name in _LATER:  # they bring handlers, configs and checkpoints, which the package's own import leaves out
        return getattr(import_module(f"ignite_engine.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
