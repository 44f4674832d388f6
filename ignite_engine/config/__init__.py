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

# importable from here in earlier versions
from ignite_engine.config.yaml_file import Source as Source
from ignite_engine.config.yaml_file import display as shown  # noqa: F401
from ignite_engine.config.yaml_file import read_source as read_source
from ignite_engine.errors import did_you_mean as did_you_mean

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
