"""Handlers for the bus of a :class:`ignite_engine.Trainer`; each attaches by itself and knows no other."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ignite_engine.handlers.checkpoint import Checkpoint
    from ignite_engine.handlers.digest_trail import DigestTrail
    from ignite_engine.handlers.early_stopping import EarlyStopping
    from ignite_engine.handlers.ema import EMA
    from ignite_engine.handlers.evaluation import Evaluation
    from ignite_engine.handlers.export import Export
    from ignite_engine.handlers.graceful_stop import GracefulStop
    from ignite_engine.handlers.limits import SaveEvery, StopFile, WallClockLimit
    from ignite_engine.handlers.lr_schedule import LRSchedule
    from ignite_engine.handlers.memory import MemoryLogger
    from ignite_engine.handlers.meters import Meter, Stopwatch
    from ignite_engine.handlers.metric_logger import MetricLogger
    from ignite_engine.handlers.model_bank import ModelBank
    from ignite_engine.handlers.profiler import Profiler
    from ignite_engine.handlers.progress import Progress
    from ignite_engine.handlers.sinks import ConsoleSink, JSONLSink
    from ignite_engine.handlers.step_times import StepTimes
    from ignite_engine.handlers.throughput import Throughput
    from ignite_engine.handlers.trackers.clearml import ClearML
    from ignite_engine.handlers.trackers.mlflow import MLflow
    from ignite_engine.handlers.trackers.tensorboard import TensorBoard
    from ignite_engine.handlers.trackers.tracker import Tracker
    from ignite_engine.handlers.trackers.wandb import WandB
    from ignite_engine.handlers.training_metrics import TrainingMetrics
    from ignite_engine.schedules import (
        Schedule,
        constant,
        warmup_constant,
        warmup_cosine,
        warmup_inverse_sqrt,
        warmup_linear,
        warmup_polynomial,
        warmup_wsd,
    )

__all__ = [
    "EMA",
    "Checkpoint",
    "ClearML",
    "ConsoleSink",
    "DigestTrail",
    "EarlyStopping",
    "Evaluation",
    "Export",
    "GracefulStop",
    "JSONLSink",
    "LRSchedule",
    "MLflow",
    "MemoryLogger",
    "Meter",
    "MetricLogger",
    "ModelBank",
    "Profiler",
    "Progress",
    "SaveEvery",
    "Schedule",
    "StepTimes",
    "StopFile",
    "Stopwatch",
    "TensorBoard",
    "Throughput",
    "Tracker",
    "TrainingMetrics",
    "WallClockLimit",
    "WandB",
    "constant",
    "warmup_constant",
    "warmup_cosine",
    "warmup_inverse_sqrt",
    "warmup_linear",
    "warmup_polynomial",
    "warmup_wsd",
]

# Each handler is loaded when it is asked for: a run uses some, and a process would take a tenth longer to start.
_MODULES = {
    "Checkpoint": "ignite_engine.handlers.checkpoint",
    "ClearML": "ignite_engine.handlers.trackers.clearml",
    "ConsoleSink": "ignite_engine.handlers.sinks",
    "DigestTrail": "ignite_engine.handlers.digest_trail",
    "EMA": "ignite_engine.handlers.ema",
    "EarlyStopping": "ignite_engine.handlers.early_stopping",
    "Evaluation": "ignite_engine.handlers.evaluation",
    "Export": "ignite_engine.handlers.export",
    "GracefulStop": "ignite_engine.handlers.graceful_stop",
    "JSONLSink": "ignite_engine.handlers.sinks",
    "LRSchedule": "ignite_engine.handlers.lr_schedule",
    "MLflow": "ignite_engine.handlers.trackers.mlflow",
    "MemoryLogger": "ignite_engine.handlers.memory",
    "Meter": "ignite_engine.handlers.meters",
    "MetricLogger": "ignite_engine.handlers.metric_logger",
    "ModelBank": "ignite_engine.handlers.model_bank",
    "Profiler": "ignite_engine.handlers.profiler",
    "Progress": "ignite_engine.handlers.progress",
    "SaveEvery": "ignite_engine.handlers.limits",
    "Schedule": "ignite_engine.schedules",
    "StepTimes": "ignite_engine.handlers.step_times",
    "StopFile": "ignite_engine.handlers.limits",
    "Stopwatch": "ignite_engine.handlers.meters",
    "TensorBoard": "ignite_engine.handlers.trackers.tensorboard",
    "Throughput": "ignite_engine.handlers.throughput",
    "Tracker": "ignite_engine.handlers.trackers.tracker",
    "TrainingMetrics": "ignite_engine.handlers.training_metrics",
    "WallClockLimit": "ignite_engine.handlers.limits",
    "WandB": "ignite_engine.handlers.trackers.wandb",
    "constant": "ignite_engine.schedules",
    "warmup_constant": "ignite_engine.schedules",
    "warmup_cosine": "ignite_engine.schedules",
    "warmup_inverse_sqrt": "ignite_engine.schedules",
    "warmup_linear": "ignite_engine.schedules",
    "warmup_polynomial": "ignite_engine.schedules",
    "warmup_wsd": "ignite_engine.schedules",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
