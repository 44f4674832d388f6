"""Intervals and durations of a config: ``500``, ``{epochs: 0.25}``, ``{samples: 10000}``, ``{minutes: 10}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_serializer, model_validator

from ignite_engine.config.yaml_file import SCIENTIFIC, display
from ignite_engine.errors import did_you_mean


class _InOneUnit(BaseModel):
    """A number of one of several units; a bare number is of the first one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    whole: ClassVar[tuple[str, ...]] = ()
    """Units that are counted."""
    real: ClassVar[tuple[str, ...]] = ()
    """Units that may be fractions."""
    expected: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _one_unit(cls, value: object) -> object:
        if isinstance(value, cls):
            return value
        units = (*cls.whole, *cls.real)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = {units[0]: value}
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ValueError(f"got {display(value)}, {cls.expected}")
        unit, number = next(iter(value.items()))
        if isinstance(number, str) and SCIENTIFIC.fullmatch(number):  # which YAML 1.1 reads as text
            number = float(number)
        if unit in cls.whole and isinstance(number, float) and number.is_integer():
            number = int(number)
        if unit not in units:
            raise ValueError(f"got the unit {unit!r}, {cls.expected}{did_you_mean(str(unit), units).removesuffix('.')}")
        if unit in cls.whole and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"got {display(number)} {unit}, {cls.expected}, of at least 1")
        if unit in cls.real and (
            isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf
        ):
            raise ValueError(f"got {display(number)} {unit}, {cls.expected}, above 0")
        return {unit: number}

    @property
    def given(self) -> tuple[str, int | float]:
        """The unit and the number."""
        units = (*self.whole, *self.real)
        return next((unit, value) for unit in units if (value := getattr(self, unit)) is not None)

    @model_serializer
    def _as_written(self) -> int | float | dict[str, int | float]:
        unit, number = self.given
        return number if unit == (*self.whole, *self.real)[0] else {unit: number}


class Every(_InOneUnit):
    """An interval: ``500`` or ``{iterations: 500}``, in updates, ``{epochs: 0.25}``, ``{samples: 10000}``."""

    whole: ClassVar[tuple[str, ...]] = ("iterations", "windows", "samples", "tokens")
    real: ClassVar[tuple[str, ...]] = ("epochs",)
    expected = (
        "expected a number of iterations, such as 500, {epochs: 1}, {windows: 1}, {samples: 50000} or {tokens: 1e6}"
    )
    iterations: int | None = None
    windows: int | None = None
    samples: int | None = None
    tokens: int | None = None
    epochs: int | float | None = None


class EveryOrMinutes(Every):
    """An interval that may be of wall-clock time: for what does not change the result of the run."""

    real = ("epochs", "seconds", "minutes")
    expected = f"{Every.expected.replace(' or {tokens', ', {tokens')}, {{seconds: 30}} or {{minutes: 10}}"
    seconds: float | None = None
    minutes: float | None = None


class TimeLimit(_InOneUnit):
    """A duration: ``3600``, in seconds, ``{minutes: 90}`` or ``{hours: 23.5}``."""

    real = ("seconds", "minutes", "hours")
    expected = "expected seconds, such as 3600, {minutes: 90} or {hours: 23.5}"
    seconds: float | None = None
    minutes: float | None = None
    hours: float | None = None

    @property
    def total_s(self) -> float:
        """In seconds."""
        return (self.seconds or 0.0) + 60.0 * (self.minutes or 0.0) + 3600.0 * (self.hours or 0.0)
