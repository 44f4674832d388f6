"""The content of a run directory as values; a run that is still running, or was killed, can be read as well."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ignite_engine.run_directory import RunDirectory

LOG_LINES = 40
Points = list[tuple[int, float]]


class NotARun(FileNotFoundError):
    """A directory that is not that of a run; the message is one line and names the remedy."""


@dataclass(frozen=True)
class Record:
    """A run as its files describe it.

    Attributes:
        path: its directory, as given.
        series: the finite points ``(iteration, value)`` of everything logged, by name, in order.
        not_finite: the iterations at which a series was NaN or infinite.
        config, summary, environment: empty where the file is missing.
        log: the last lines of rank 0's log.
    """

    path: Path
    series: Mapping[str, Points]
    not_finite: Mapping[str, list[int]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""

    @property
    def name(self) -> str:
        """The config's ``run.name``, or the directory's name."""
        return str((self.config.get("run") or {}).get("name") or self.path.absolute().name)

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "unknown"))

    def last(self, key: str) -> float | None:
        """The newest value of a series."""
        points = self.series.get(key)
        return points[-1][1] if points else None


def read_run(directory: str | Path) -> Record:
    """Read a run directory.

    Raises:
        NotARun: it is not there, or holds neither metrics nor a summary.
    """
    run = RunDirectory(directory)
    if not run.path.is_dir():
        raise NotARun(f"{run.path} is not a directory: give that of a run, such as runs/byte_gpt.")
    if not run.metrics.exists() and not run.summary.exists():
        raise NotARun(
            f"{run.path} is not the directory of a run: it has neither {run.metrics.name} nor "
            f"{run.summary.name}; give the one that the config names as run.directory."
        )
    series, not_finite = _read_metrics(run.metrics)
    return Record(
        run.path,
        series,
        not_finite,
        _mapping(run.config, yaml.safe_load),
        run.read_summary(),
        _mapping(run.environment, json.loads),
        _last_lines(run.logs / "rank_0.log"),
    )


def _read_metrics(path: Path) -> tuple[dict[str, Points], dict[str, list[int]]]:
    series: dict[str, Points] = {}
    not_finite: dict[str, list[int]] = {}
    if not path.exists():
        return series, not_finite
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
                iteration = int(row.pop("iteration"))
            except (ValueError, KeyError, TypeError, AttributeError):  # an incomplete line: being written, or torn
                continue
            for name, value in row.items():
                if isinstance(value, bool) or not isinstance(value, int | float | str):
                    continue
                try:
                    number = float(value)
                except ValueError:
                    continue
                if math.isfinite(number):
                    series.setdefault(name, []).append((iteration, number))
                else:
                    not_finite.setdefault(name, []).append(iteration)
    return series, not_finite


def _mapping(path: Path, parse: Any) -> dict[str, Any]:
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _last_lines(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - 32768, 0))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_LINES:])
