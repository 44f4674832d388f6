"""Text for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def in_columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """One line for each row; the cells of a column are padded to its widest one, two spaces lie between columns."""
    cells = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
