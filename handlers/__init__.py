"""Handlers for the bus of a :class:`ignite_engine.Trainer`; each attaches by itself and knows no other."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ignite_engine.handlers.checkpoint import Checkpoint as Checkpoint
    from ignite_engine.handlers.digest_trail import DigestTrail as DigestTrail
    from ignite_engine.handlers.early_stopping import EarlyStopping as EarlyStopping
    from ignite_engine.handlers.ema import EMA as EMA
    from ignite_engine.handlers.evaluation import Evaluation as Evaluation
    from ignite_engine.handlers.export import Export as Export
    from ignite_engine.handlers.graceful_stop import GracefulStop as GracefulStop
    from ignite_engine.handlers.limits import WallClockLimit as WallClockLimit
    from ignite_engine.handlers.lr_schedule import LRSchedule as LRSchedule
    from ignite_engine.handlers.memory import MemoryLogger as MemoryLogger
    from ignite_engine.handlers.metric_logger import MetricLogger as MetricLogger
    from ignite_engine.handlers.progress import Progress as Progress
    from ignite_engine.handlers.step_times import StepTimes as StepTimes
    from ignite_engine.handlers.throughput import Throughput as Throughput
    from ignite_engine.handlers.trackers.clearml import ClearML as ClearML
    from ignite_engine.handlers.trackers.mlflow import MLflow as MLflow
    from ignite_engine.handlers.trackers.tensorboard import TensorBoard as TensorBoard
    from ignite_engine.handlers.trackers.wandb import WandB as WandB
    from ignite_engine.schedules import warmup_cosine as warmup_cosine
    from ignite_engine.schedules import warmup_linear as warmup_linear

MODULES = {
    "LRSchedule": "lr_schedule",
    "EMA": "ema",
    "Evaluation": "evaluation",
    "MemoryLogger": "memory",
    "Throughput": "throughput",
    "StepTimes": "step_times",
    "MetricLogger": "metric_logger",
    "ClearML": "trackers.clearml",
    "TensorBoard": "trackers.tensorboard",
    "WandB": "trackers.wandb",
    "MLflow": "trackers.mlflow",
    "DigestTrail": "digest_trail",
    "Profiler": "profiler",
    "Progress": "progress",
    "EarlyStopping": "early_stopping",
    "Checkpoint": "checkpoint",
    "Export": "export",
    "ModelBank": "model_bank",
    "GracefulStop": "graceful_stop",
    "WallClockLimit": "limits",
    "StopFile": "limits",
}
"""Each handler's module, in the order in which ``fit`` and a config attach them."""
_RARE = {"ModelBank", "Profiler", "StopFile"}
"""Imported from their modules."""
_HOMES = {name: f"ignite_engine.handlers.{module}" for name, module in MODULES.items() if name not in _RARE}
_HOMES |= dict.fromkeys(("warmup_cosine", "warmup_linear"), "ignite_engine.schedules")
__all__ = sorted(_HOMES)  # each is imported when it is asked for: a run uses some of them


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
