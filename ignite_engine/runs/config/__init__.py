"""A run's settings: YAML files and overrides to typed sections and entries of what the names in them stand for."""

from ignite_engine.runs.config.load import Config, ConfigError, ConfigWarning, config_from_dict, load_config

__all__ = ["Config", "ConfigError", "ConfigWarning", "config_from_dict", "load_config"]
