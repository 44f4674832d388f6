"""An event-bus training engine on PyTorch-Ignite: exact resume, agreed stops, little overhead."""

from typing import TYPE_CHECKING, Any

from ignite_engine.data import Arrays, Files, Windows, loader
from ignite_engine.engine.intervals import every
from ignite_engine.errors import Interrupted, StopRequested
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.ranks.launch import Parallel
from ignite_engine.ranks.mesh import data_rank, data_size, use_mesh
from ignite_engine.rng import seed_everything
from ignite_engine.runs.load_model import load_model, load_weights
from ignite_engine.sparse.ids import IdRows, hash_ids
from ignite_engine.sparse.rowwise_adagrad import RowwiseAdagrad
from ignite_engine.state import Start, TrainingState
from ignite_engine.step.micro_batches import Group, accumulation_steps_for, gradient_sync
from ignite_engine.task import Task
from ignite_engine.trainer import Trainer, create_evaluator
from ignite_engine.update import Update, Updates

if TYPE_CHECKING:
    from ignite_engine.runs.fit import fit

__all__ = [
    "Arrays",
    "Files",
    "Group",
    "IdRows",
    "Interrupted",
    "Parallel",
    "Phase",
    "RowwiseAdagrad",
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
    "data_rank",
    "data_size",
    "every",
    "fit",
    "hash_ids",
    "gradient_sync",
    "load_model",
    "load_weights",
    "loader",
    "seed_everything",
    "use_mesh",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "fit":  # it brings handlers and configs, which the package's own import leaves out
        from ignite_engine.runs.fit import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
