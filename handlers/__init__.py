"""Handlers for the bus of a :class:`ignite_engine.Trainer`; each attaches by itself and knows no other."""

from ignite_engine.handlers.checkpoint import Checkpoint
from ignite_engine.handlers.clearml.sink import ClearMLLogger
from ignite_engine.handlers.early_stopping import EarlyStopping
from ignite_engine.handlers.ema import EMA
from ignite_engine.handlers.evaluation import Evaluation
from ignite_engine.handlers.graceful_stop import GracefulStop
from ignite_engine.handlers.ids import IdAdmission
from ignite_engine.handlers.limits import SaveEvery, StopFile, WallClockLimit
from ignite_engine.handlers.lr_schedule import LRSchedule
from ignite_engine.handlers.media import Histogram, Image, MediaFiles
from ignite_engine.handlers.memory import MemoryLogger
from ignite_engine.handlers.meters import Meter, Stopwatch
from ignite_engine.handlers.metric_logger import MetricLogger
from ignite_engine.handlers.model_bank import ModelBank
from ignite_engine.handlers.profiler import Profiler
from ignite_engine.handlers.progress import Progress
from ignite_engine.handlers.sinks import ConsoleSink, CSVSink, JSONLSink
from ignite_engine.handlers.step_times import StepTimes
from ignite_engine.handlers.tensorboard_sink import TensorBoardSink
from ignite_engine.handlers.throughput import Throughput
from ignite_engine.handlers.trackers import MLflowSink, WandBSink
from ignite_engine.handlers.weight_drift import WeightDrift
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
    "CSVSink",
    "Checkpoint",
    "ClearMLLogger",
    "ConsoleSink",
    "EarlyStopping",
    "Evaluation",
    "GracefulStop",
    "Histogram",
    "IdAdmission",
    "Image",
    "JSONLSink",
    "LRSchedule",
    "MLflowSink",
    "MediaFiles",
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
    "TensorBoardSink",
    "Throughput",
    "WallClockLimit",
    "WandBSink",
    "WeightDrift",
    "constant",
    "warmup_constant",
    "warmup_cosine",
    "warmup_inverse_sqrt",
    "warmup_linear",
    "warmup_polynomial",
    "warmup_wsd",
]
