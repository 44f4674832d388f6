"""The content of a run directory as values; a run that is still running, or was killed, can be read as well."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ignite_engine.checkpointing.retention import usual_mode
from ignite_engine.report.goodput import Ledger, read_ledger
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
        config, summary, environment: empty where the file is missing; the config may be that of the newest checkpoint.
        history: how the run was started and ended each time, see ``RunDirectory.note``.
        judged_by: the metric by which its checkpoints are judged, and ``min`` or ``max``, as the newest of them says.
        log: the last lines of rank 0's log.
        ledger: where its time went, if that was measured.
    """

    path: Path
    series: Mapping[str, Points]
    not_finite: Mapping[str, list[int]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    judged_by: tuple[str, str] | None = None
    log: str = ""
    ledger: Ledger | None = None

    @property
    def name(self) -> str:
        """The config's ``run.name``, or the directory's name."""
        return str(_part(self.config, "run").get("name") or self.path.absolute().name)

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "unknown"))

    @property
    def followed(self) -> tuple[str, str] | None:
        """The metric that the run followed, and whether ``min`` or ``max`` is good; None: it followed none."""
        for key, name in (("checkpoint", "best"), ("early_stopping", "metric")):
            section = _part(self.config, key)
            if isinstance(section.get(name), str):
                return str(section[name]), "max" if section.get("mode") == "max" else "min"
        return self.judged_by

    def best(self, key: str, mode: str | None = None) -> tuple[int, float] | None:
        """The best point of a series, the first of equal ones.

        Args:
            mode: ``min`` or ``max``; None: as the run followed the metric, or else as its name says.
        """
        if mode is None:
            mode = (
                self.followed[1] if self.followed is not None and self.followed[0] == key else usual_mode(key) or "min"
            )
        points = self.series.get(key)
        if not points:
            return None
        return min(points, key=lambda point: point[1] if mode == "min" else -point[1])

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
    checkpoint = _newest_manifest(run)
    if not run.metrics.exists() and not run.summary.exists():
        raise NotARun(
            f"{run.path} is not the directory of a run: it has neither {run.metrics.name} nor "
            f"{run.summary.name}; give the one that the config names as run.directory."
        )
    series, not_finite = _read_metrics(run.metrics)
    summary, best = _usable(run.read_summary()), _part(checkpoint, "best")
    history = run.read_history()
    if not summary:  # a run of the Python API
        known = ("iteration", "epoch", "world_size")
        summary = {name: checkpoint[name] for name in known if name in checkpoint} | _last_known(history)
    written = _mapping(run.config, yaml.safe_load)
    return Record(
        run.path,
        series,
        not_finite,
        written or _part(checkpoint, "config"),
        summary,
        _mapping(run.environment, json.loads) or _part(checkpoint, "environment"),
        history,
        (str(best["metric"]), "max" if best.get("mode") == "max" else "min") if "metric" in best else None,
        _last_lines(run.logs / "rank_0.log"),
        read_ledger(run.goodput),
    )


_NUMBERS = ("iteration", "epoch", "wall_s", "parameters", "world_size")


def _usable(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary whose numbers are numbers and whose groups are groups; what was written by hand or torn is left out."""

    def fits(key: str, value: Any) -> bool:
        if key in _NUMBERS:
            return isinstance(value, int | float) and not isinstance(value, bool)
        return key not in ("metrics", "startup_s") or isinstance(value, dict)

    return {key: value for key, value in summary.items() if fits(key, value)}


def _last_known(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Status, iteration and reason, as the last line of the history says."""
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
    """What the newest checkpoint says of itself; empty without one."""
    manifests = [*run.checkpoints.glob("*/manifest.json"), *run.path.glob("*/manifest.json")]
    found = [_mapping(path, json.loads) for path in manifests if not path.parent.name.startswith(".")]
    return max(found, key=lambda each: each["sequence"] if isinstance(each.get("sequence"), int) else 0, default={})


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
