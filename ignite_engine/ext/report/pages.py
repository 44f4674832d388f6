"""The two pages: one run, and several compared."""

from __future__ import annotations

import importlib.resources
import json
import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from ignite_engine.ext.report.charts import COLOURS, OF_ENGINE, charts_of, figure
from ignite_engine.ext.report.records import Record, read_run
from ignite_engine.ext.report.timeline import iterations_per_epoch, seconds, timeline
from ignite_engine.runs.run_directory import write_whole
from ignite_engine.text import flat, short

# The browser enforces that nothing is loaded.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
RELOAD_S = 15
"""Seconds after which the browser reloads the page of a run that continues."""


def write_report(directory: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of one run; returns its path, by default ``report.html`` in the run's directory.

    Raises:
        NotARun: the directory does not hold a run.
    """
    run = read_run(directory)
    path = Path(output) if output is not None else run.path / "report.html"
    measured = {key: points[-1][1] for key, points in run.series.items()} | (run.summary.get("metrics") or {})
    rest = {key: value for key, value in run.summary.items() if key not in ("metrics", "status", "reason")}
    parts = [
        f"<h1>{escape(run.name)}</h1>",
        f'<p class="under">{escape(str(run.path.absolute()))}</p>',
        _outcome(run),
        _tiles(run),
        *_curves([run], [run.name]),
        *_folded("Last values", {key: value for key, value in measured.items() if not key.startswith(OF_ENGINE)}),
        *_folded("Config", run.config),
        *_folded("Summary", rest),
        *_folded("Environment", run.environment),
        *_folded("End of the log", run.log, is_open=run.status == "failed"),
    ]
    write_whole(path, _page(run.name, parts, reloads=run.status == "running"))
    return path


def write_comparison(runs: Sequence[str | Path], output: str | Path = "compare.html") -> Path:
    """Write the page that compares several runs, given by their directories; returns its path.

    Raises:
        NotARun: a directory does not hold a run.
    """
    path, records = Path(output), [read_run(run) for run in runs]
    names = names_of(records)
    parts = [
        f"<h1>{len(records)} runs compared</h1>",
        _runs_table(records, names, path),
        _config_differences(records, names),
        *_curves(records, names),
    ]
    write_whole(path, _page("Runs compared", parts))
    return path


def _page(title: str, parts: Sequence[str], *, reloads: bool = False) -> str:
    def asset(name: str) -> str:
        return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

    # drops uPlot's first line with its address; the licence stays with the code
    uplot = f"/* uPlot\n{asset('uplot/LICENSE')}*/\n{asset('uplot/uPlot.iife.min.js').partition(chr(10))[2]}"
    reload = f'<meta http-equiv="refresh" content="{RELOAD_S}">' * reloads
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">{reload}'
        f"<title>{escape(title)}</title><style>\n{asset('uplot/uPlot.min.css')}\n{asset('page.css')}</style></head>"
        "<body><main>\n" + "\n".join(parts) + f"\n</main><script>\n{uplot}\n{asset('page.js')}</script></body></html>\n"
    )
    return page.encode(errors="replace").decode()  # JSON may contain half a character, which UTF-8 cannot


def _outcome(run: Record) -> str:
    summary, status = run.summary, run.status
    where = f"at iteration {summary['iteration']:,}" if "iteration" in summary else ""
    reason = f": {summary['reason']}" if summary.get("reason") else ""
    also = {
        "running": "It is still running, or was killed.",
        "interrupted": "The same command resumes from its last checkpoint.",
        "unknown": "There is no summary.json.",
    }.get(status, "")
    text = f"<b>{escape(status)}</b> {where}{escape(reason)}. {also}"
    return f'<p class="status {escape(status, quote=True)}">{text}</p>'


def _tiles(run: Record) -> str:
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)} <small>{escape(remark)}</small></dd></div>"
        for name, value, remark in _key_numbers(run)
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def _key_numbers(run: Record) -> Iterator[tuple[str, str, str]]:
    """Name, value and remark of the most important numbers; the metric that the run followed comes first."""
    for key in _compared_metrics([run]):
        if key != "loss" and (best := run.best(key)) is not None:
            length = iterations_per_epoch(run)
            epoch = f", epoch {short(best[0] / length)}" if length else ""
            yield f"{key}, best", short(best[1]), f"at {best[0]:,}{epoch}"
    if (loss := run.last("loss")) is not None:
        yield "loss, last", short(loss), ""
    for key, points in run.series.items():
        values = [value for _, value in points]
        if key.startswith("throughput/"):
            yield key, short(fmean(values)), "mean"
        elif key in ("memory/peak_mib", "memory/host_rss_mib"):
            yield key, short(max(values)), "most"
    if (took := seconds(run)) is not None:
        starts = sum(entry.get("what") in ("started", "resumed") for entry in run.history)
        yield "time", duration(took), f"in {starts} starts" if starts > 1 else ""
    for key in ("parameters", "epoch", "world_size"):
        if key in run.summary:
            yield key, short(float(run.summary[key])), ""


def _curves(runs: Sequence[Record], names: Sequence[str]) -> list[str]:
    """The charts; the engine's own measurements are folded below the others."""
    charts = charts_of(runs, names)
    if not charts:
        return ["<h2>Curves</h2><p>Nothing was logged twice yet, so there are no curves.</p>"]
    figures = [(chart["of_engine"], figure(chart, number)) for number, chart in enumerate(charts)]
    users_own = "\n".join(html for of_engine, html in figures if not of_engine)
    engines = "\n".join(html for of_engine, html in figures if of_engine)
    lines = [timeline(run) for run in runs]
    about = escape(_script_data(lines), quote=True)
    return [
        "<h2>Curves</h2>",
        _controls([chart["title"] for chart in charts], lines),
        "<noscript><p>The curves are drawn by a script of this page; scripts are off.</p></noscript>",
        f'<div class="charts">\n{users_own}\n</div>',
        f"<details data-folded{'' if users_own else ' open'}><summary>Speed, times and memory</summary>"
        f'<div class="charts">\n{engines}\n</div></details>'
        if engines
        else "",
        f'<script type="application/json" id="charts" data-runs="{about}">{_script_data(charts)}</script>',
    ]


def _controls(titles: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> str:
    def choice(name: str, label: str, options: Mapping[str, str]) -> str:
        inside = "".join(
            f'<option value="{escape(value, quote=True)}">{escape(text)}</option>' for value, text in options.items()
        )
        return f'<label>{label} <select data-control="{name}">{inside}</select></label>'

    known = {"iteration": "iteration"}
    known |= {"epoch": "epoch"} if all(line["epoch"] for line in lines) else {}
    known |= {"time": "time in training"} if all(line["hours"] for line in lines) else {}
    return (
        '<form class="controls" autocomplete="off">'
        + choice("chart", "Show", {"": "all charts"} | {title: title for title in titles})
        + choice("axis", "over", known)
        + '<label><input type="checkbox" data-control="logx"/> logarithmic x</label>'
        + choice("y", "y", {"auto": "as it fits", "linear": "linear", "log": "logarithmic"})
        + '<label>smoothing <input type="range" min="0" max="0.99" step="0.01" value="0" data-control="smoothing"/>'
        + "</label>"
        + '<span class="hint">Drag sideways in a chart to zoom.</span>'
        + '<button type="button" data-reset>Whole run</button></form>'
    )


def _script_data(values: Sequence[Mapping[str, Any]]) -> str:
    """JSON that is safe inside a ``<script>``."""
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


def _folded(title: str, content: str | Mapping[str, Any], *, is_open: bool = False) -> list[str]:
    """A folded section with a text, or with values as YAML."""
    text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    opened = " open" if is_open else ""
    return [f"<details{opened}><summary>{title}</summary><pre>{escape(text)}</pre></details>"] if content else []


def _compared_metrics(runs: Sequence[Record]) -> list[str]:
    """The metrics that the runs followed, and their losses."""
    losses = sorted({key for run in runs for key in run.series if key == "loss" or key.endswith("/loss")}, key=len)
    followed = [run.followed[0] for run in runs if run.followed is not None and run.followed[0] in run.series]
    return list(dict.fromkeys([*followed, *losses]))


def _runs_table(runs: Sequence[Record], names: Sequence[str], page: Path) -> str:
    keys = _compared_metrics(runs)
    rows = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        report, shown = run.path / "report.html", escape(name)
        if report.exists():
            link = urllib.parse.quote(os.path.relpath(report.absolute(), page.absolute().parent))
            shown = f'<a href="{escape(link, quote=True)}">{shown}</a>'
        best = [run.best(key) for key in keys]
        took = seconds(run)
        numbers = [str(run.summary.get("iteration", "")), *("" if at is None else short(at[1], 5) for at in best)]
        cells = [escape(run.status), *map(escape, numbers), "" if took is None else duration(took)]
        rows.append([f'<span class="swatch c{number % COLOURS}"></span>{shown}', *cells])
    return _table(["run", "status", "iteration", *(f"{key}, best" for key in keys), "time"], rows)


def _config_differences(runs: Sequence[Record], names: Sequence[str]) -> str:
    """A row for each key whose value differs between the runs' configs."""
    configs = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.directory")  # each has its own
    cells = {key: [json.dumps(config[key]) if key in config else "not set" for config in configs] for key in keys}
    rows = [[escape(key), *map(escape, texts)] for key, texts in cells.items() if len(set(texts)) > 1]
    return "<h2>Differences of the configs</h2>" + (_table(["key", *names], rows) if rows else "<p>None.</p>")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the cells are HTML, the titles plain text."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{titles}</tr>{lines}</table></div>'


def names_of(runs: Sequence[Record]) -> list[str]:
    """The runs' names; if two are equal, the names of their folders, or else names with paths."""
    names, folders = [run.name for run in runs], [run.path.absolute().name for run in runs]
    if len(set(folders)) == len(runs) > len(set(names)):
        return folders
    return [f"{name} ({run.path})" if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]


def duration(seconds: float) -> str:
    """A duration to three digits or to the second, precise enough to tell runs apart."""
    if seconds < 120:
        return f"{seconds:#.3g}".rstrip(".") + " s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
