"""Which curves share a chart: one panel for each kind of value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ignite_engine.ext.report.records import Record
from ignite_engine.ext.report.scales import Point

TIMES = {name: f"time/{name.replace(' ', '_')}_ms" for name in ("data wait", "forward", "backward", "optimizer")}
"""The parts of a step."""
COLOURS = 8
_GIB_FROM_MIB = 8192.0
OF_ENGINE = ("throughput/", "time/", "memory/")
"""How the names of what the engine measures of itself begin."""


@dataclass(frozen=True)
class Line:
    """A named curve of the page's n-th ``run``.

    ``mark`` selects its colour, ``dashed`` distinguishes it from another of the same colour.
    """

    name: str
    points: Sequence[Point]
    mark: int
    dashed: bool = False
    run: int = 0


@dataclass(frozen=True)
class Panel:
    """Curves over one axis; ``stacked``: each line's values are added to those of the lines before it.

    ``exact``: without noise, so it is never smoothed. ``of_engine``: speed, times and memory, which a page folds away.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    from_zero: bool = True
    may_be_log: bool = False
    stacked: bool = False
    exact: bool = False
    notes: Sequence[str] = ()
    of_engine: bool = False


def panels_of(run: Record) -> list[Panel]:
    """The panels of one run, the loss first, what the engine measures of itself last; a series of one point is none."""
    series = {name: points for name, points in run.series.items() if len(points) > 1 and name != "epoch"}
    metrics = list(dict.fromkeys(key.partition("/")[2] for key in series if _is_evaluated(key)))
    others = [key for key in series if "/" not in key and key not in ("loss", "lr", "grad_norm", *metrics)]
    parts = _parts_of_the_loss(series)
    drawn = {drawn for name, _ in parts for drawn in (name, f"loss/{name}")}
    made = [
        _panel(run, "Loss", "", _sets(series, "loss"), from_zero=False, may_be_log=True),
        _loss_parts(run, parts),
        *(_metric(run, series, name) for name in metrics if name != "loss" and name not in drawn),
        _panel(run, "Learning rate", "", _rates(series), exact=True),
        _panel(run, "Gradient norm", "", {key: key for key in series if key == "grad_norm"}, may_be_log=True),
        *(_panel(run, key, "", {key: key}, from_zero=False) for key in others),
    ]
    of_engine = [
        _throughput(run, series),
        _time_split(run, series),
        _other_times(run, series),
        *_memory_panels(run, series),
    ]
    return [panel for panel in made if panel is not None] + [
        replace(panel, of_engine=True) for panel in of_engine if panel is not None
    ]


def _parts_of_the_loss(series: Mapping[str, Sequence[Point]]) -> list[tuple[str, dict[str, str]]]:
    """Name and lines of each part of a loss of several; what else has the name of one, too."""
    names = [key.removeprefix("loss/") for key in series if key.startswith("loss/")]
    return [(name, _sets(series, name) | _sets(series, f"loss/{name}") | {"train": f"loss/{name}"}) for name in names]


def _loss_parts(run: Record, parts: Sequence[tuple[str, Mapping[str, str]]]) -> Panel | None:
    """All parts of the loss in one chart, those of one part in one colour."""
    lines = [
        Line(name if place == 0 else f"{name}, {of_set}", run.series[key], mark, dashed=place > 0)
        for mark, (name, found) in enumerate(parts)
        for place, (of_set, key) in enumerate(sorted(found.items(), key=lambda item: item[0] != "train"))
    ]
    keys = [key for _, found in parts for key in found.values()]
    notes = [_not_finite(key, run.not_finite[key]) for key in keys if key in run.not_finite]
    return Panel("Parts of the loss", "", lines, from_zero=False, may_be_log=True, notes=notes) if lines else None


def _metric(run: Record, series: Mapping[str, Sequence[Point]], name: str) -> Panel | None:
    """A metric of all sets; one that never changes, such as a baseline, is only in the table of last values."""
    lines = _sets(series, name)
    return _panel(run, name, "", lines, from_zero=False) if any(_moves(run, key) for key in lines.values()) else None


def _moves(run: Record, key: str) -> bool:
    return len({value for _, value in run.series.get(key, ())}) > 1


def _is_evaluated(key: str) -> bool:
    """Whether it is a set's metric, such as val/loss."""
    return "/" in key and not key.startswith(("lr/", "loss/", *OF_ENGINE))


def _sets(series: Mapping[str, Sequence[Point]], metric: str) -> dict[str, str]:
    """Lines of one metric: of training, and of each evaluated set."""
    own = {"train": metric} if metric in series else {}
    ending = f"/{metric}"
    return own | {key.removesuffix(ending): key for key in series if key.endswith(ending) and _is_evaluated(key)}


def _rates(series: Mapping[str, Sequence[Point]]) -> dict[str, str]:
    """One line for all groups with the same LR."""
    lines: dict[str, str] = {}
    for key in [key for key in series if key == "lr" or key.startswith("lr/")]:
        same = next((name for name, drawn in lines.items() if series[drawn] == series[key]), None)
        if same is None:
            lines[key.removeprefix("lr/")] = key
    return lines


def _throughput(run: Record, series: Mapping[str, Sequence[Point]]) -> Panel | None:
    """The finest rate available."""
    units = [unit for unit in ("tokens", "samples", "steps") if f"throughput/{unit}_per_s" in series]
    lines = {unit: f"throughput/{unit}_per_s" for unit in units[:1]}
    return _panel(run, "Throughput", f"{units[0]}/s, all ranks" if units else "", lines)


def _time_split(run: Record, series: Mapping[str, Sequence[Point]]) -> Panel | None:
    """The parts of a step's time, stacked up to the whole."""
    if "time/step_ms" not in series:
        return None
    whole = dict(series["time/step_ms"])
    parts = {name: dict(series[key]) for name, key in TIMES.items() if key in series}
    parts["rest"] = {
        at: max(total - sum(part.get(at, 0.0) for part in parts.values()), 0.0) for at, total in whole.items()
    }
    lines = [
        Line(name, [(at, part.get(at, 0.0)) for at in whole], mark) for mark, (name, part) in enumerate(parts.items())
    ]
    return Panel("Time per iteration", "ms, mean over ranks", lines, stacked=True)


def _other_times(run: Record, series: Mapping[str, Sequence[Point]]) -> Panel | None:
    """Times that are no part of an iteration, such as those between iterations."""
    known = {"time/step_ms", *TIMES.values()}
    keys = [key for key in series if key.startswith("time/") and key.endswith("_ms") and key not in known]
    lines = {key.removeprefix("time/").removesuffix("_ms"): key for key in keys}
    return _panel(run, "Other times", "ms", lines)


def _memory_panels(run: Record, series: Mapping[str, Sequence[Point]]) -> list[Panel | None]:
    names = {key: key.removeprefix("memory/") for key in series if key.endswith("_mib")}
    keys = [key for key in names if key.startswith("memory/")]
    panels: list[Panel | None] = []
    for title, chosen in (
        ("Memory of the device", [key for key in keys if not names[key].startswith("host_")]),
        ("Memory of the host", [key for key in keys if names[key].startswith("host_")]),
    ):
        if not chosen:
            continue
        large = max(value for key in chosen for _, value in series[key]) >= _GIB_FROM_MIB
        scale = 1 / 1024 if large else 1.0
        lines = {
            names[key].removeprefix("host_").removesuffix("_mib").replace("rss", "in use now"): key for key in chosen
        }
        unit = ("GiB" if large else "MiB") + ", the worst rank"
        panels.append(_panel(run, title, unit, lines, scale=scale))
    return panels


def _panel(
    run: Record,
    title: str,
    unit: str,
    lines: Mapping[str, str],
    *,
    from_zero: bool = True,
    may_be_log: bool = False,
    exact: bool = False,
    scale: float = 1.0,
) -> Panel | None:
    """A panel of the series in ``lines``; None without any."""
    if not lines:
        return None
    drawn = [
        Line(name, [(at, value * scale) for at, value in run.series[key]], mark)
        for mark, (name, key) in enumerate(lines.items())
    ]
    notes = [_not_finite(name, run.not_finite[key]) for name, key in lines.items() if key in run.not_finite]
    return Panel(title, unit, drawn, from_zero, may_be_log, exact=exact, notes=notes)


def _not_finite(name: str, iterations: Sequence[int]) -> str:
    first = ", ".join(map(str, iterations[:3]))
    more = f" and {len(iterations) - 3} more" if len(iterations) > 3 else ""
    return f"{name} is not finite at iteration {first}{more}"


def compared_panels(runs: Sequence[Record], names: Sequence[str]) -> list[Panel]:
    """One panel for each series, with a line for each run; the loss first."""
    left_out = {"epoch"}
    if any("throughput/tokens_per_s" in run.series for run in runs):
        left_out.add("throughput/samples_per_s")
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.series) if key not in left_out]
    made = []
    for key in sorted(keys, key=_order_on_page):  # stable: otherwise in the order of the files
        logged = {n: run.series[key] for n, run in enumerate(runs) if len(run.series.get(key, ())) > 1}
        lines = [Line(names[n], points, n, dashed=n >= COLOURS, run=n) for n, points in logged.items()]
        # a group's LR that always equals that of the first group
        is_copy = key.startswith("lr/") and all(run.series.get(key) in (None, run.series.get("lr")) for run in runs)
        if not lines or is_copy or (_is_evaluated(key) and not any(_moves(run, key) for run in runs)):
            continue
        notes = [_not_finite(names[n], runs[n].not_finite[key]) for n in logged if key in runs[n].not_finite]
        may_be_log = key == "grad_norm" or key.rpartition("/")[2] == "loss"
        exact = key == "lr" or key.startswith("lr/")
        from_zero, of_engine = _order_on_page(key) > _METRICS_UNTIL, key.startswith(OF_ENGINE)
        made.append(Panel(key, "", lines, from_zero, may_be_log, exact=exact, notes=notes, of_engine=of_engine))
    return made


_METRICS_UNTIL = 2


def _order_on_page(key: str) -> int:
    """The place of a series on the page; up to ``_METRICS_UNTIL`` it is a metric, whose axis need not start at zero."""
    tests = (
        key == "loss",
        key.endswith("/loss"),
        _is_evaluated(key),
        key == "lr" or key.startswith("lr/"),
        key == "grad_norm",
        key.startswith("throughput/"),
        key.startswith("time/"),
        key.startswith("memory/"),
    )
    return tests.index(True) if any(tests) else 2
