"""An event-bus training engine on PyTorch-Ignite: exact resume, agreed stops, little overhead."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ignite_engine.data.loader import loader
    from ignite_engine.errors import Interrupted
    from ignite_engine.events import TrainingEvents
    from ignite_engine.loop.evaluator import create_evaluator
    from ignite_engine.loop.intervals import every
    from ignite_engine.ranks.launch import Parallel
    from ignite_engine.rng import seed_everything
    from ignite_engine.runs.fit import fit
    from ignite_engine.runs.load_model import load_weights
    from ignite_engine.runs.task import Task
    from ignite_engine.trainer import Trainer
    from ignite_engine.update import Update, Updates

__all__ = [
    "Interrupted",
    "Parallel",
    "Task",
    "Trainer",
    "TrainingEvents",
    "Update",
    "Updates",
    "Windows",
    "create_evaluator",
    "every",
    "fit",
    "load_weights",
    "loader",
    "seed_everything",
]
__version__ = "0.1.0"

_HOMES = {
    "data.loader": ("loader",),
    "ext.windows.windows": ("Windows",),
    "loop.intervals": ("every",),
    "errors": ("Interrupted",),
    "loop.evaluator": ("create_evaluator",),
    "events": ("TrainingEvents",),
    "ranks.launch": ("Parallel",),
    "rng": ("seed_everything",),
    "runs.fit": ("fit",),
    "runs.load_model": ("load_weights",),
    "runs.task": ("Task",),
    "trainer": ("Trainer",),
    "update": ("Update", "Updates"),
}
_MODULES = {name: f"ignite_engine.{home}" for home, names in _HOMES.items() for name in names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:  # each is imported when it is asked for, with what it needs and no more
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
