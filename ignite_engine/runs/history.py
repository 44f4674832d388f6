"""The values that a run has logged, one record per log point."""

from __future__ import annotations

import importlib
from typing import Any

from ignite_engine.runs.run_directory import RunDirectory

_NOT_FINITE = {text: float(text) for text in ("nan", "inf", "-inf")}


class Records(list[dict[str, Any]]):
    """One dict per log point: ``iteration``, ``epoch`` and what was written there, by name."""

    def to_pandas(self) -> Any:
        """A ``DataFrame`` with a row per log point; a value that was not written there is NaN.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError:
            raise ModuleNotFoundError("to_pandas() needs pandas: pip install pandas.", name="pandas") from None
        return pandas.DataFrame(list(self))


def read_records(run: RunDirectory) -> Records:
    """The lines of a run's log; numbers that are not finite as floats."""
    return Records(
        {name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in line.items()}
        for line in run.logged()
    )
