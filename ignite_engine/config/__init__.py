"""A run's settings: YAML files and overrides to typed sections. Imports pydantic, so the core never imports it."""

from ignite_engine.config.load import Config, ConfigError, ConfigWarning, Every, config_from_dict, load_config
from ignite_engine.config.sections import (
    CheckpointSection,
    DataSection,
    DistributedSection,
    EarlyStoppingSection,
    EmaSection,
    EvaluationSection,
    LoggingSection,
    OptimizerSection,
    ProfilerSection,
    RunSection,
    ScheduleSection,
    Section,
    UpdateSection,
)

__all__ = [
    "CheckpointSection",
    "Config",
    "ConfigError",
    "ConfigWarning",
    "DataSection",
    "DistributedSection",
    "EarlyStoppingSection",
    "EmaSection",
    "EvaluationSection",
    "Every",
    "LoggingSection",
    "OptimizerSection",
    "ProfilerSection",
    "RunSection",
    "ScheduleSection",
    "Section",
    "UpdateSection",
    "config_from_dict",
    "load_config",
]
