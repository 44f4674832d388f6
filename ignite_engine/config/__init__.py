"""A run's settings: YAML files and overrides to typed sections. Imports pydantic, so the core never imports it."""

from ignite_engine.config.load import Config, ConfigError, ConfigWarning, Every, config_from_dict, load_config

__all__ = ["Config", "ConfigError", "ConfigWarning", "Every", "config_from_dict", "load_config"]
