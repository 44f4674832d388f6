"""Values as text: tables and short numbers for people, JSON for files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, SupportsFloat

from torch.utils._pytree import tree_map


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


def as_float(what: str, value: SupportsFloat) -> float:
    """``value`` as a float.

    Raises:
        ValueError: it is too large for one; the sentence begins with ``what``.
    """
    try:
        return float(value)
    except OverflowError:
        kind = type(value).__name__
        raise ValueError(f"{what} must fit into a float, got a larger {kind}: give its logarithm.") from None


def plain_metric(name: str, value: Any) -> Any:
    """A value of ``state.metrics`` as JSON has it: tensors and arrays become numbers, or lists of them.

    Raises:
        ValueError: it is neither a number nor text, nor made of them, or no float holds it.
    """
    if type(value) is int:
        as_float(f"state.metrics[{name!r}]", value)  # sinks and the best checkpoint take floats
    if type(value) in (float, int, bool, str, NoneType):
        return value
    try:
        is_one = hasattr(value, "item") and math.prod(value.shape) == 1
        plain = value.item() if is_one else json.loads(json.dumps(in_lists(value)))
    except (TypeError, ValueError, RuntimeError):
        plain = None
    if plain is None:
        raise ValueError(
            f"state.metrics[{name!r}] is a {type(value).__name__}, expected a number, or lists of numbers."
        )
    return plain


def in_lists(value: Any) -> Any:
    """A metric's value with its tensors and arrays as numbers, or lists of them."""
    return tree_map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, value)


def json_values(value: Any) -> Any:
    """Nested plain values for JSON; NaN and infinities as :func:`json_number` writes them."""
    if isinstance(value, Mapping):
        return {str(key): json_values(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(element) for element in value]
    return json_number(value) if isinstance(value, float) else value


def json_number(value: float) -> float | str:
    """``value``, or ``"nan"``, ``"inf"``, ``"-inf"``: JSON has no such numbers, and ``float()`` reads these back."""
    return value if value - value == 0 else str(value)
