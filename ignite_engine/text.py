"""Values as text: tables and short numbers for people, JSON for files."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, SupportsFloat

METRICS, STARTS = "metrics.jsonl", "starts.jsonl"
"""In a run's folder, its log, and when it was started and ended: lines of JSON, each with its iteration."""
_NOT_FINITE = {text: float(text) for text in ("nan", "inf", "-inf")}


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
    from torch.utils._pytree import tree_map  # the trackers' processes have no torch

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


def from_json(value: Any) -> Any:
    """What :func:`json_number` was given; any other value as it is."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def objects_in(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects with an iteration among lines of a log; what is torn, or not of a log, is left out."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            values = json.loads(line)
            if isinstance(values, dict) and isinstance(values.get("iteration"), int):
                yield values


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log, one at a time; none where it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        yield from objects_in(file)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none, or it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys; an empty one is a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{key}.{below}": leaf for below, leaf in flat(value).items()}
        else:
            found[str(key)] = value
    return found
