"""The two pages: one run, and several compared."""

from __future__ import annotations

import importlib.resources
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from ignite_engine.ext.report.charts import chart, script_data
from ignite_engine.ext.report.panels import COLOURS, OF_ENGINE, Panel, compared_panels, panels_of
from ignite_engine.ext.report.records import Record, read_run
from ignite_engine.ext.report.timeline import iterations_per_epoch, seconds, timeline
from ignite_engine.runs.run_directory import flat, write_whole
from ignite_engine.text import short

# The browser enforces that nothing is loaded.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Tile:
    """A number of the run."""

    name: str
    value: str
    remark: str = ""


RELOAD_S = 15
"""After which the page of a run that goes on is loaded again by the browser."""
_NOT_SET = object()


def write_report(
    directory: str | Path, output: str | Path | None = None, defaults: Mapping[str, Any] | None = None
) -> Path:
    """Write the page of one run; returns its path, by default ``report.html`` in the run's directory.

    Args:
        defaults: of the config; settings that equal theirs are folded.

    Raises:
        NotARun: the directory does not hold a run.
    """
    run = read_run(directory)
    path = Path(output) if output is not None else run.path / "report.html"
    write_whole(path, report_page(run, defaults or {}))
    return path


def write_comparison(runs: Sequence[str | Path], output: str | Path = "compare.html") -> Path:
    """Write the page that compares several runs, given by their directories; returns its path.

    Raises:
        NotARun: a directory does not hold a run.
    """
    records = [read_run(run) for run in runs]
    links = [_link(run.path / "report.html", Path(output)) for run in records]
    write_whole(Path(output), comparison_page(records, links))
    return Path(output)


def _link(page: Path, output: Path) -> str | None:
    """The relative address of a run's page, as a link in ``output``; None: it has none, or is on another drive."""
    if not page.exists():
        return None
    relative = os.path.relpath(page.absolute(), output.absolute().parent)
    return urllib.parse.quote(relative)


def report_page(run: Record, defaults: Mapping[str, Any]) -> str:
    """The page of one run as HTML; ``defaults`` are the default values of its config."""
    parts = [
        f"<h1>{escape(run.name)}</h1>",
        f'<p class="under">{escape(str(run.path.absolute()))}</p>',
        _outcome(run),
        _tiles(_key_numbers(run)),
        *_curves(panels_of(run), [run]),
        *_config_section(run.config, defaults),
        *_last_values(run),
        *_environment(run.environment),
    ]
    if run.log:
        is_open = " open" if run.status == "failed" else ""
        parts.append(f"<details{is_open}><summary>End of the log</summary><pre>{escape(run.log)}</pre></details>")
    return _page(run.name, parts, reloads=run.status == "running")


def comparison_page(runs: Sequence[Record], links: Sequence[str | None]) -> str:
    """The page of several runs as HTML; each run has the same colour in all charts."""
    names = names_of(runs)
    parts = [
        f"<h1>{len(runs)} runs compared</h1>",
        _runs_table(runs, names, _compared_metrics(runs), links),
        *_config_differences(runs, names),
        *_curves(compared_panels(runs, names), runs),
    ]
    return _page("Runs compared", parts)


def _page(title: str, parts: Sequence[str], *, reloads: bool = False) -> str:
    def asset(name: str) -> str:
        return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

    # uPlot's first line is its address, and a page names none; its licence is to go where it goes
    uplot = f"/* uPlot\n{asset('uplot/LICENSE')}*/\n{asset('uplot/uPlot.iife.min.js').partition(chr(10))[2]}"
    reload = f'<meta http-equiv="refresh" content="{RELOAD_S}">' * reloads
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">{reload}'
        f"<title>{escape(title)}</title><style>\n{asset('uplot/uPlot.min.css')}\n{asset('page.css')}</style></head>"
        "<body><main>\n" + "\n".join(parts) + f"\n</main><script>\n{uplot}\n{asset('page.js')}</script></body></html>\n"
    )
    return page.encode(errors="replace").decode()  # JSON may have half a character, UTF-8 has none


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


def _key_numbers(run: Record) -> list[Tile]:
    """The most important numbers, the metric that the run followed first."""
    summary = run.summary
    tiles = []
    followed = [run.followed[0]] if run.followed is not None else []
    for key in dict.fromkeys([*followed, *(key for key in run.series if key.endswith("/loss"))]):
        if (best := run.best(key)) is None:
            continue
        iteration, value = best
        epoch = (length := iterations_per_epoch(run)) and f", epoch {short(iteration / length)}"
        tiles.append(Tile(f"{key}, best", short(value), f"at {iteration:,}{epoch or ''}"))
    if (loss := run.last("loss")) is not None:
        tiles.append(Tile("Loss, last", short(loss)))
    rates = [("tokens", "tokens/s"), ("samples", "samples/s"), ("steps", "steps/s")]
    key, unit = next(
        ((f"throughput/{name}_per_s", unit) for name, unit in rates if f"throughput/{name}_per_s" in run.series),
        ("", ""),
    )
    if key:
        tiles.append(Tile("Throughput, mean", short(fmean(value for _, value in run.series[key])), unit))
    for key, name in (("memory/peak_mib", "Device memory, peak"), ("memory/host_rss_mib", "Host memory, most")):
        if key in run.series:
            tiles.append(Tile(name, short(max(value for _, value in run.series[key])), "MiB"))
    if (took := seconds(run)) is not None:
        starts = sum(entry.get("what") in ("started", "resumed") for entry in run.history)
        tiles.append(Tile("Time", duration(took), f"in {starts} starts" if starts > 1 else ""))
    if "parameters" in summary:
        tiles.append(Tile("Parameters", short(float(summary["parameters"]))))
    if "epoch" in summary:
        tiles.append(Tile("Epoch", str(summary["epoch"])))
    if summary.get("world_size", 1) != 1:
        tiles.append(Tile("Ranks", str(summary["world_size"])))
    return tiles


def _tiles(tiles: Sequence[Tile]) -> str:
    cells = "".join(
        f"<div><dt>{escape(tile.name)}</dt><dd>{escape(tile.value)} <small>{escape(tile.remark)}</small></dd></div>"
        for tile in tiles
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def _curves(panels: Sequence[Panel], runs: Sequence[Record]) -> list[str]:
    """The charts; those of the engine's own measurements are folded below the others."""
    if not panels:
        return ["<h2>Curves</h2><p>Nothing was logged twice yet, so there are no curves.</p>"]
    charts = [(panel.of_engine, *chart(panel, number)) for number, panel in enumerate(panels)]
    users_own = "\n".join(html for of_engine, html, _ in charts if not of_engine)
    engines = "\n".join(html for of_engine, html, _ in charts if of_engine)
    data = [data for _, _, data in charts]
    lines = [timeline(run) for run in runs]
    about = escape(script_data(lines), quote=True)
    folded = [
        f"<details data-folded{'' if users_own else ' open'}><summary>Speed, times and memory</summary>",
        f'<div class="charts">\n{engines}\n</div></details>',
    ]
    return [
        "<h2>Curves</h2>",
        _controls([panel.title for panel in panels], lines),
        "<noscript><p>The curves are drawn by a script of this page; scripts are off.</p></noscript>",
        f'<div class="charts">\n{users_own}\n</div>',
        *(folded if engines else []),
        f'<script type="application/json" id="charts" data-runs="{about}">{script_data(data)}</script>',
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


def _config_section(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """What differs from the defaults; the rest is folded. A config of other sections is shown as it is."""
    if not config:
        return []
    values, usual = flat(config), flat(defaults) if defaults.keys() <= config.keys() else {}
    chosen = {key: value for key, value in values.items() if key not in usual or usual[key] != value}
    cards = _cards(config, chosen)
    whole = _cards(config, values)
    if len(chosen) == len(values):
        return [f'<h2>Config</h2><div class="cards">{whole}</div>']
    return [
        '<h2>Config <span class="unit">what differs from the defaults</span></h2>',
        f'<div class="cards">{cards}</div>',
        f'<details><summary>All {len(values)} settings</summary><div class="cards">{whole}</div></details>',
    ]


def _cards(config: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """A card for each section with some of the values."""
    sections = {key: f"{key}." for key, value in config.items() if isinstance(value, Mapping)}
    top = {key: value for key, value in values.items() if key in config and key not in sections}
    cards = {"task": top} | {
        name: {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
        for name, start in sections.items()
    }
    return "".join(_card(name, part) for name, part in cards.items() if part)


def _last_values(run: Record) -> list[str]:
    values = run.summary.get("metrics") or {key: points[-1][1] for key, points in run.series.items()}
    kept = {key: value for key, value in values.items() if key != "epoch"}
    rest = {
        key: value
        for key, value in run.summary.items()
        if key not in ("metrics", "startup_s", "status", "reason") and value not in (None, {})
    }
    startup = {
        phase: f"{seconds:.2f} s"
        for phase, seconds in (run.summary.get("startup_s") or {}).items()
        if isinstance(seconds, int | float) and abs(seconds) < 1e15
    }
    measured = {key: value for key, value in kept.items() if not key.startswith(OF_ENGINE)}
    of_engine = {key: value for key, value in kept.items() if key.startswith(OF_ENGINE)}
    parts = (("last values", measured), ("run", flat(rest)), ("start-up", startup))
    cards = "".join(_card(name, part) for name, part in parts if part)
    folded = "Last values of speed, times and memory"
    return [
        *([f'<h2>Summary</h2><div class="cards">{cards}</div>'] if cards else []),
        *([f"<details><summary>{folded}</summary>{_card('', of_engine)}</details>"] if of_engine else []),
    ]


def _environment(environment: Mapping[str, Any]) -> list[str]:
    if not environment:
        return []
    packages = environment.get("packages", {})
    kept = {key: value for key, value in environment.items() if key != "packages"}
    chosen = {name: packages[name] for name in ("torch", "pytorch-ignite", "numpy") if name in packages}
    cards = _card("machine and command", flat(kept)) + _card("packages", chosen)
    return [f'<details><summary>Environment</summary><div class="cards">{cards}</div></details>']


def _card(name: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(key))}</td><td>{escape(text_of(value))}</td></tr>" for key, value in values.items()
    )
    head = f"<h3>{escape(name)}</h3>" if name else ""
    return f'<div class="card">{head}<table>{rows}</table></div>'


def _compared_metrics(runs: Sequence[Record]) -> list[str]:
    """What the runs followed, and their losses."""
    losses = sorted({key for run in runs for key in run.series if key == "loss" or key.endswith("/loss")}, key=len)
    followed = [run.followed[0] for run in runs if run.followed is not None and run.followed[0] in run.series]
    return list(dict.fromkeys([*followed, *losses]))


def _runs_table(
    runs: Sequence[Record],
    names: Sequence[str],
    keys: Sequence[str],
    links: Sequence[str | None],
) -> str:
    titles = ["run", "status", "iteration", *(f"{key}, best" for key in keys), "time"]
    rows = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        best = [run.best(key) for key in keys]
        cells = [
            str(run.summary.get("iteration", "")),
            *("" if point is None else short(point[1], 5) for point in best),
        ]
        cells.append("" if (took := seconds(run)) is None else duration(took))
        numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        swatch = f'<span class="swatch c{index % COLOURS}"></span>'
        link = links[index]
        shown = escape(name) if link is None else f'<a href="{escape(link, quote=True)}">{escape(name)}</a>'
        rows.append(f"<tr><td>{swatch}{shown}</td><td>{escape(run.status)}</td>{numbers}</tr>")
    kinds = ["", "", *[' class="number"'] * (len(titles) - 2)]
    head = "".join(f"<th{kind}>{escape(title)}</th>" for kind, title in zip(kinds, titles, strict=True))
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _config_differences(runs: Sequence[Record], names: Sequence[str]) -> list[str]:
    """A row for each key whose value differs between the configs."""
    configs = [flat(run.config) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        # each run has a folder of its own anyway
        if key != "run.directory" and len({repr(config.get(key, _NOT_SET)) for config in configs}) > 1
    ]
    if not keys:
        return ["<h2>Differences of the configs</h2><p>None.</p>"]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("key", *names))
    rows = "".join(
        f"<tr><td>{escape(key)}</td>"
        + "".join(f"<td>{escape(text_of(config.get(key, 'not set')))}</td>" for config in configs)
        + "</tr>"
        for key in keys
    )
    return [f'<h2>Differences of the configs</h2><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>']


def names_of(runs: Sequence[Record]) -> list[str]:
    """The runs' names; where two are equal, their folders' names, or else names with paths."""
    names, folders = [run.name for run in runs], [run.path.absolute().name for run in runs]
    if len(set(folders)) == len(runs) > len(set(names)):
        return folders
    return [f"{name} ({run.path})" if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]


def text_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list) and value and all(isinstance(element, str) for element in value):
        return " ".join(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """To three digits or seconds, as runs are told apart by it."""
    if seconds < 120:
        return f"{seconds:#.3g}".rstrip(".") + " s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
