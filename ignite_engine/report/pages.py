"""The two pages: one run, and several compared."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ignite_engine.report.charts import chart, script_data, span_of
from ignite_engine.report.panels import COLOURS, Panel, compared_panels, panels_of
from ignite_engine.report.records import Record, read_run
from ignite_engine.report.scales import short
from ignite_engine.run_directory import flat, write_whole

# The browser enforces that nothing is loaded.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(directory: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of one run; returns its path, by default ``report.html`` in the run's directory.

    Raises:
        NotARun: the directory is not that of a run.
    """
    run = read_run(directory)
    path = Path(output) if output is not None else run.path / "report.html"
    write_whole(path, report_page(run))
    return path


def write_comparison(directories: Sequence[str | Path], output: str | Path = "compare.html") -> Path:
    """Write the page that compares several runs; returns its path.

    Raises:
        NotARun: a directory is not that of a run.
    """
    runs = [read_run(each) for each in directories]
    write_whole(Path(output), comparison_page(runs))
    return Path(output)


def report_page(run: Record) -> str:
    """The page of one run as HTML."""
    parts = [
        f"<h1>{escape(run.name)}</h1>",
        f'<p class="under">{escape(str(run.path.absolute()))}</p>',
        _outcome(run),
        _tiles(_key_numbers(run)),
        *_curves(panels_of(run)),
        *_config_cards(run.config),
        *_last_values(run),
        *_environment(run.environment),
    ]
    if run.log:
        is_open = " open" if run.status == "failed" else ""
        parts.append(f"<details{is_open}><summary>End of the log</summary><pre>{escape(run.log)}</pre></details>")
    return _page(run.name, parts)


def comparison_page(runs: Sequence[Record]) -> str:
    """The page of several runs as HTML; each has the same colour in all charts."""
    names = _names(runs)
    parts = [
        f"<h1>{len(runs)} runs compared</h1>",
        '<p class="under">By iteration. Each run has the same colour in all charts.</p>',
        _runs_table(runs, names),
        *_curves(compared_panels(runs, names)),
        *_differences(runs, names),
    ]
    return _page("Runs compared", parts)


def _page(title: str, parts: Sequence[str]) -> str:
    def asset(name: str) -> str:
        return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>\n{asset('page.css')}</style></head><body><main>\n"
        + "\n".join(parts)
        + f"\n</main><script>\n{asset('page.js')}</script></body></html>\n"
    )


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


def _key_numbers(run: Record) -> list[tuple[str, str, str]]:
    """Name, value and remark of the most important numbers."""
    summary = run.summary
    tiles = []
    if (loss := run.last("loss")) is not None:
        tiles.append(("Loss, last", short(loss), ""))
    for key in [key for key in run.series if key.endswith("/loss")]:
        iteration, best = min(run.series[key], key=lambda point: point[1])
        tiles.append((f"{key}, best", short(best), f"at {iteration:,}"))
    rates = [("tokens", "tokens/s"), ("samples", "samples/s"), ("steps", "steps/s")]
    key, unit = next(
        ((f"throughput/{name}_per_s", unit) for name, unit in rates if f"throughput/{name}_per_s" in run.series),
        ("", ""),
    )
    if key:
        values = [value for _, value in run.series[key]]
        tiles.append(("Throughput, mean", short(sum(values) / len(values)), unit))
    for key, name in (("memory/peak_mib", "Device memory, peak"), ("memory/host_peak_mib", "Host memory, peak")):
        if key in run.series:
            tiles.append((name, short(max(value for _, value in run.series[key])), "MiB"))
    if "wall_s" in summary:
        tiles.append(("Time, last start", _duration(float(summary["wall_s"])), ""))
    if "parameters" in summary:
        tiles.append(("Parameters", short(float(summary["parameters"])), ""))
    if "epoch" in summary:
        tiles.append(("Epoch", str(summary["epoch"]), ""))
    if summary.get("world_size", 1) != 1:
        tiles.append(("Ranks", str(summary["world_size"]), ""))
    return tiles


def _tiles(tiles: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)} <small>{escape(remark)}</small></dd></div>"
        for name, value, remark in tiles
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def _curves(panels: Sequence[Panel]) -> list[str]:
    if not panels:
        return ["<h2>Curves</h2><p>Nothing was logged twice yet, so there are no curves.</p>"]
    span = span_of(panels)
    charts = [chart(panel, number, span) for number, panel in enumerate(panels)]
    figures = "\n".join(html for html, _ in charts)
    data = script_data([data for _, data in charts])
    return [
        f'<h2>Curves</h2><div class="charts">\n{figures}\n</div>',
        f'<script type="application/json" id="charts">{data}</script>',
    ]


def _config_cards(config: Mapping[str, Any]) -> list[str]:
    if not config:
        return []
    top_level = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    sections = {key: value for key, value in config.items() if isinstance(value, Mapping) and value}
    cards = [_card(name, flat(values)) for name, values in ({"task": top_level} | sections).items() if values]
    return [f'<h2>Config</h2><div class="cards">{"".join(cards)}</div>']


def _last_values(run: Record) -> list[str]:
    values = run.summary.get("metrics") or {key: points[-1][1] for key, points in run.series.items()}
    kept = {key: value for key, value in values.items() if key != "epoch"}
    rest = {
        key: value
        for key, value in run.summary.items()
        if key not in ("metrics", "startup_s", "status", "reason") and value is not None
    }
    startup = {phase: f"{seconds:.2f} s" for phase, seconds in (run.summary.get("startup_s") or {}).items()}
    cards = [_card(name, part) for name, part in (("run", rest), ("start-up", startup), ("last values", kept)) if part]
    return [f'<h2>Summary</h2><div class="cards">{"".join(cards)}</div>'] if cards else []


def _environment(environment: Mapping[str, Any]) -> list[str]:
    if not environment:
        return []
    packages = environment.get("packages", {})
    kept = {key: value for key, value in environment.items() if key != "packages"}
    chosen = {name: packages[name] for name in ("torch", "pytorch-ignite", "numpy") if name in packages}
    cards = _card("machine and command", flat(kept)) + _card("packages", chosen)
    return [f'<h2>Environment</h2><div class="cards">{cards}</div>']


def _card(name: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(key))}</td><td>{escape(_text(value))}</td></tr>" for key, value in values.items()
    )
    return f'<div class="card"><h3>{escape(name)}</h3><table>{rows}</table></div>'


def _runs_table(runs: Sequence[Record], names: Sequence[str]) -> str:
    losses = sorted({key for run in runs for key in run.series if key == "loss" or key.endswith("/loss")}, key=len)
    titles = ["run", "status", "iteration", *(f"{key}, best" for key in losses), "time, last start"]
    rows = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        best = [min((value for _, value in run.series.get(key, ())), default=None) for key in losses]
        cells = [str(run.summary.get("iteration", "")), *("" if value is None else short(value, 5) for value in best)]
        cells.append(_duration(float(run.summary["wall_s"])) if "wall_s" in run.summary else "")
        numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        swatch = f'<span class="swatch c{index % COLOURS}"></span>'
        rows.append(f"<tr><td>{swatch}{escape(name)}</td><td>{escape(run.status)}</td>{numbers}</tr>")
    kinds = ["", "", *[' class="number"'] * (len(titles) - 2)]
    head = "".join(f"<th{kind}>{escape(title)}</th>" for kind, title in zip(kinds, titles, strict=True))
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _differences(runs: Sequence[Record], names: Sequence[str]) -> list[str]:
    """A row for each key whose value differs between the configs."""
    configs = [flat(run.config) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if any(config.get(key, "not set") != configs[0].get(key, "not set") for config in configs)
    ]
    if not keys:
        return ["<h2>Differences of the configs</h2><p>None.</p>"]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("key", *names))
    rows = "".join(
        f"<tr><td>{escape(key)}</td>"
        + "".join(f"<td>{escape(_text(config.get(key, 'not set')))}</td>" for config in configs)
        + "</tr>"
        for key in keys
    )
    return [f'<h2>Differences of the configs</h2><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>']


def _names(runs: Sequence[Record]) -> list[str]:
    """The runs' names, with their paths where two are equal."""
    names = [run.name for run in runs]
    return [f"{name} ({run.path})" if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
