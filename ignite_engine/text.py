"""Text for people to read: tables and short numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def in_columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """One line for each row; the cells of a column are padded to its widest one, two spaces lie between columns."""
    cells = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]


def in_units(count: int) -> str:
    """Bytes in the largest binary unit that gives at least 1."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:,.0f} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def short(value: float, digits: int = 4) -> str:
    """``value``, rounded to so many digits, as a label: 12.3k, 0.0015, 2e-05."""
    value = float(f"{value:.{digits - 1}e}")  # before a unit is chosen: 999999.9 is 1M
    for limit, scale, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if limit <= abs(value) < 1e15:
            return f"{value / scale:g}{unit}"
    return f"{value:g}"
