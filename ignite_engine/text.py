"""Text for people to read: tables and short numbers."""

from __future__ import annotations

import math
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
    """``value`` as a label: 12.3k, 0.0015, 2e-5."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if size < 1e-3 or size >= 1e15:
        mantissa, _, exponent = f"{value:.{max(digits - 2, 0)}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{_rounded(value / (1e3 if unit == 'k' else limit), digits)}{unit}"
    return _rounded(value, digits)


def _rounded(value: float, digits: int) -> str:
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    leading = 0 if abs(value) >= 1 or value == 0 else -math.floor(math.log10(abs(value))) - 1
    text = f"{value:.{max(digits - whole + leading, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
