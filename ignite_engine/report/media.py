"""Images, texts and histograms that a run has logged, on its page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ignite_engine.run_directory import lines_of
from ignite_engine.text import short

SHOWN = 8
"""Points in time that are shown of each name."""
BUDGET = 4 * 2**20
"""Bytes of everything shown."""


def media_section(folder: Path) -> list[str]:
    """A figure for each name, with a slider over some of its iterations, the newest first in sight.

    Of many or large ones the newest are shown, as many as a page can bear.
    """
    names: dict[str, list[tuple[int, Path]]] = {}
    for iteration, name, file in _listed(folder):
        names.setdefault(name, []).append((iteration, file))
    chosen = {name: _spread(files) for name, files in names.items()}
    left, shown = BUDGET, dict[tuple[str, int], str]()
    for back in range(1, SHOWN + 1):
        for name, files in chosen.items():
            if back <= len(files):
                iteration, file = files[-back]
                html = _html(file, left)
                left -= len(html or "")
                if html is not None:
                    shown[name, iteration] = html
    views = {name: [(at, shown[name, at]) for at, _ in files if (name, at) in shown] for name, files in chosen.items()}
    figures = "".join(_figure(name, view) for name, view in views.items() if view)
    return [f'<h2>Media</h2><div class="cards">{figures}</div>'] if figures else []


def _listed(folder: Path) -> list[tuple[int, str, Path]]:
    """Iteration, name and file of all that the index lists and the folder holds."""
    found, inside = [], folder.resolve()
    for row in lines_of(folder / "index.jsonl"):
        iteration = row.pop("iteration", None)
        if not isinstance(iteration, int):
            continue
        for name, file in row.items():
            path = folder / str(file)
            if name != "epoch" and path.is_file() and path.resolve().is_relative_to(inside):
                found.append((iteration, name, path))
    return found


def _spread(files: Sequence[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """At most ``SHOWN`` of them, evenly, with the first and the last."""
    if len(files) <= SHOWN:
        return list(files)
    return [files[round(index * (len(files) - 1) / (SHOWN - 1))] for index in range(SHOWN)]


def _html(file: Path, left: int) -> str | None:
    """What a file shows; None if it cannot be read or is larger than what is left of the page."""
    try:
        if 4 * file.stat().st_size / 3 > left:
            return None
        content = file.read_bytes()
        if file.suffix == ".png":
            return f'<img alt="" src="data:image/png;base64,{base64.b64encode(content).decode()}"/>'
        if file.suffix == ".txt":
            return f"<pre>{escape(content.decode('utf-8', errors='replace'))}</pre>"
        return _histogram(json.loads(content)) if file.suffix == ".json" else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _histogram(values: Mapping[str, Any]) -> str:
    counts, edges = [float(count) for count in values["counts"]], [float(edge) for edge in values["edges"]]
    highest, width = max(counts) or 1.0, 100 / len(counts)
    bars = "".join(
        f'<path d="M{at * width:.2f} 40V{40 - 40 * count / highest:.2f}h{width:.2f}V40Z"/>'
        for at, count in enumerate(counts)
        if count
    )
    ends = f"<span>{short(edges[0], 3)}</span><span>{short(edges[-1], 3)}</span>"
    return (
        f'<svg class="bars" viewBox="0 0 100 40" preserveAspectRatio="none">{bars}</svg><div class="ends">{ends}</div>'
    )


def _figure(name: str, views: Sequence[tuple[int, str]]) -> str:
    hidden = [" hidden"] * (len(views) - 1) + [""]
    inside = "".join(
        f'<div data-view{hide}><span class="unit">iteration {at:,}</span>{html}</div>'
        for hide, (at, html) in zip(hidden, views, strict=True)
    )
    last = len(views) - 1
    slider = (
        f'<input type="range" min="0" max="{last}" value="{last}" data-views aria-label="iteration"/>' if last else ""
    )
    return f'<figure class="media"><h3>{escape(name)}</h3>{slider}{inside}</figure>'
