"""The stored config of a run as one that can be loaded again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignite_engine.config.sections import OptimizerSection, ScheduleSection, Section


def loadable(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The values, a copy, without the sections in whose place is what the task has made, a scheduler of its own say."""
    from pydantic import ValidationError

    values = {key: dict(value) if isinstance(value, Mapping) else value for key, value in stored.items()}
    models: dict[str, type[Section]] = {"optimizer": OptimizerSection, "schedule": ScheduleSection}
    for section, model in models.items():
        try:
            model.model_validate(values.get(section, {}))
        except ValidationError:
            del values[section]
    return values
