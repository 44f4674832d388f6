"""The ledger on a run's page: a bar with its parts, their names, and the verdict."""

from __future__ import annotations

from html import escape

from ignite_engine.report.goodput.ledger import PARTS, Ledger, failures_text

COLOURS = {
    "productive": "good",
    "data_wait": "c1",
    "evaluation": "c0",
    "checkpoint": "c3",
    "handlers": "c7",
    "startup": "c4",
    "restart": "c5",
    "downtime": "faint",
    "wasted": "bad",
}
"""Colours of the parts, from the page's own."""
SHOWN = 0.001
"""A smaller share is not named."""


def goodput_section(ledger: Ledger | None) -> list[str]:
    """The section as HTML; nothing without a ledger."""
    if ledger is None or ledger.wall_s <= 0:
        return []
    shares = {part: seconds / ledger.wall_s for part, seconds in ledger.seconds.items()}
    bars, left = [], 0.0
    for part, share in shares.items():
        if share > 0:
            title = f"<title>{escape(PARTS[part])}: {_percent(share)}</title>"
            bars.append(
                f'<rect x="{1000 * left:.2f}" width="{1000 * share:.2f}" height="24" '
                f'style="fill: var(--{COLOURS[part]})">{title}</rect>'
            )
        left += share
    items = "".join(
        f'<li><i style="background: var(--{COLOURS[part]})"></i>{escape(PARTS[part])} '
        f"<b>{_percent(share)}</b> {_seconds(ledger.seconds[part])}</li>"
        for part, share in shares.items()
        if share >= SHOWN
    )
    notes = (failures_text(ledger.as_values()).strip(), ledger.verdict or "")
    said = "".join(f'<p class="note">{escape(note)}</p>' for note in notes if note)
    starts = f" in {ledger.starts} starts" if ledger.starts > 1 else ""
    return [
        f'<h2>Where the time went <span class="unit">{_seconds(ledger.wall_s)}{starts}</span></h2>'
        f'<figure class="goodput"><svg viewBox="0 0 1000 24" preserveAspectRatio="none" role="img" '
        f'aria-label="Goodput {_percent(ledger.goodput)}">{"".join(bars)}</svg><ul>{items}</ul>{said}</figure>'
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"
