"""Reads the content of a run's folder, also of a run that is still running or was killed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ignite_engine.checkpoint.retention import usual_mode
from ignite_engine.errors import shortened
from ignite_engine.runs.run_directory import RunDirectory, read_yaml

LOG_LINES = 40


class NotARun(FileNotFoundError):
    """The folder does not hold a run; the message is one line with the remedy."""


@dataclass(frozen=True)
class Record:
    """A run, as described by its files.

    Attributes:
        path: its directory, as given.
        series: the finite points ``(iteration, value)`` of everything logged, by name, in order.
        not_finite: the iterations at which a series was NaN or infinite.
        config, summary, environment: empty where the file is missing; the config may be that of the newest checkpoint.
        history: how the run was started and ended each time, see ``RunDirectory.note``.
        judged_by: the metric by which its checkpoints are judged, and ``min`` or ``max``, as the newest of them says.
        log: the last lines of rank 0's log.
    """

    path: Path
    series: Mapping[str, Sequence[tuple[int, float]]]
    not_finite: Mapping[str, Sequence[int]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    judged_by: tuple[str, str] | None = None
    log: str = ""

    @property
    def name(self) -> str:
        """The config's ``run.name``, or the directory's name."""
        return str(_part(self.config, "run").get("name") or self.path.absolute().name)

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "unknown"))

    @property
    def followed(self) -> tuple[str, str] | None:
        """The metric that the run followed, and whether ``min`` or ``max`` is good; None if it followed none."""
        for label, name in (("Checkpoint", "best"), ("EarlyStopping", "key")):
            section = _part(_part(self.config, "handlers"), label)
            if isinstance(section.get(name), str):
                metric = str(section[name])
                return metric, section.get("mode") or usual_mode(metric) or "min"
        return self.judged_by

    def best(self, key: str) -> tuple[int, float] | None:
        """The best point of a series, the first of equal ones; by the run's mode, or else by the metric's name."""
        followed = self.followed
        mode = followed[1] if followed is not None and followed[0] == key else usual_mode(key) or "min"
        points = self.series.get(key)
        if not points:
            return None
        return min(points, key=lambda point: point[1] if mode == "min" else -point[1])

    def last(self, key: str) -> float | None:
        """The newest value of a series."""
        points = self.series.get(key)
        return points[-1][1] if points else None


def is_run(directory: str | Path) -> bool:
    """Whether a folder holds a run's log or summary."""
    run = RunDirectory(directory)
    return run.metrics.exists() or run.summary.exists()


def runs_in(directory: Path) -> list[Path]:
    """The folder itself if it holds a run, else the folders in it that do, by name."""
    inside = [] if is_run(directory) or not directory.is_dir() else sorted(filter(is_run, directory.iterdir()))
    return inside or [directory]


def read_run(directory: str | Path) -> Record:
    """Read a run directory.

    Raises:
        NotARun: it is not there, or holds neither metrics nor a summary.
    """
    run = RunDirectory(directory)
    if not run.given.is_dir():
        raise NotARun(f"{run.given} is not a directory: give that of a run, such as runs/byte_gpt.")
    checkpoint = _newest_manifest(run)
    if not is_run(run.given):
        inside = [path.name for path in runs_in(run.given) if path != run.given]
        remedy = (
            f"give one of the runs in it: {shortened(inside)}" if inside else "give that of the config's run.directory"
        )
        raise NotARun(
            f"{run.given} is not the directory of a run: it has neither {run.metrics.name} nor {run.summary.name}; "
            f"{remedy}."
        )
    series, not_finite = _read_metrics(run)
    summary, best = run.read_summary(), _part(checkpoint, "best")
    history = run.read_history()
    if not summary:  # a run of the Python API
        known = ("iteration", "epoch", "world_size")
        summary = {name: checkpoint[name] for name in known if name in checkpoint} | _last_known(history)
    if summary.get("status") == "running":  # it was written when the run started
        summary = {key: value for key, value in summary.items() if key != "wall_s"} | _newest(series)
    written = _mapping(run.config, read_yaml)
    return Record(
        run.given,
        series,
        not_finite,
        written or _part(checkpoint, "config"),
        summary,
        _mapping(run.environment, json.loads) or _part(checkpoint, "environment"),
        history,
        (str(best["metric"]), "max" if best.get("mode") == "max" else "min") if "metric" in best else None,
        _last_lines(run.logs / "rank_0.log"),
    )


def _newest(series: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, Any]:
    """Iteration and epoch in the last line of the log."""
    newest = {"iteration": max((points[-1][0] for points in series.values()), default=None)}
    if "epoch" in series:
        newest["epoch"] = int(series["epoch"][-1][1])
    return {key: value for key, value in newest.items() if value is not None}


def _last_known(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Status, iteration and reason in the last line of the history."""
    if not history:
        return {}
    last = history[-1]
    if last["what"] in ("started", "resumed"):
        return {"status": "running"}
    return {"status": last["what"], "iteration": last["iteration"], "reason": last.get("reason")}


def _part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _newest_manifest(run: RunDirectory) -> dict[str, Any]:
    """The manifest of the newest checkpoint; empty without one."""
    manifests = [*run.checkpoints.glob("*/manifest.json"), *run.given.glob("*/manifest.json")]
    found = [_mapping(path, json.loads) for path in manifests if not path.parent.name.startswith(".")]
    return max(
        found, key=lambda manifest: manifest["sequence"] if isinstance(manifest.get("sequence"), int) else 0, default={}
    )


def _read_metrics(run: RunDirectory) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[int]]]:
    series: dict[str, list[tuple[int, float]]] = {}
    not_finite: dict[str, list[int]] = {}
    for row in run.logged():
        iteration = row.pop("iteration")
        for name, value in row.items():
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                continue
            try:
                number = float(value)
            except (ValueError, OverflowError):
                continue
            if math.isfinite(number):
                series.setdefault(name, []).append((iteration, number))
            else:
                not_finite.setdefault(name, []).append(iteration)
    return series, not_finite


def _mapping(path: Path, parse: Any) -> dict[str, Any]:
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
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
