"""How the value of a metric is published: a number as it is, what is more as a table or a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from ignite_engine.handlers import glyphs
from ignite_engine.handlers.media import Histogram, Image
from ignite_engine.ranks import agreement
from ignite_engine.run_directory import as_float
from ignite_engine.state import TrainingState
from ignite_engine.text import in_columns, short

ROWS, COLUMNS = 200, 20
"""Most rows and columns of a table; a larger value is shown only as a histogram or a picture."""
SIDE = 240
"""The side of a picture, in pixels."""

Array = np.ndarray[Any, Any]


def publish(state: TrainingState, values: Mapping[str, Any]) -> None:
    """Write what metrics gave, by whole names: a number as a metric, what is more on rank 0 as a table or a picture."""
    parts = [value for value in values.values() if isinstance(value, Mapping)]
    for name, value in values.items():
        number = number_of(value, name)
        if number is not None:
            state.metrics[name] = number
        # Ignite writes a mapping and each of its parts
        elif agreement.rank() == 0 and not any(value is part for whole in parts for part in whole.values()):
            state.media.update(media_of(name, value))


def number_of(value: Any, name: str) -> float | None:
    """A metric's value as a number; None: it is several, or none.

    Raises:
        ValueError: no float can hold it.
    """
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return as_float(f"The metric {name!r}", value) if isinstance(value, Real) else None


def media_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What ``state.media`` takes of a metric, by name; nothing of what is not known.

    A vector (a value per class) and a report by class are a table; a matrix (of confusions: the row is the true class)
    a picture, and a table if it is small; a curve of Ignite's (ROC, precision over recall) a picture.
    """
    if isinstance(value, str):
        value = _of_json(value)
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        yield name, _report(value)
    elif isinstance(value, Sequence) and len(value) >= 2 and all(getattr(part, "ndim", 0) == 1 for part in value):
        yield name, Image(_curve(*(_array(part) for part in value[:3])))
    elif (values := _array(value)) is not None and values.ndim == 1 and values.size:
        yield (
            name,
            Histogram(values)
            if len(values) > ROWS
            else _table([[str(at), *_cells([number])] for at, number in enumerate(values)]),
        )
    elif values is not None and values.ndim == 2 and values.size:
        yield name, Image(_heat_map(values))
        if values.shape[0] <= ROWS and values.shape[1] <= COLUMNS:
            rows = [[str(at), *_cells(row)] for at, row in enumerate(values)]
            yield f"{name}/table", _table([["", *map(str, range(values.shape[1]))], *rows])


def _of_json(text: str) -> Any:
    """What Ignite's ClassificationReport writes by default, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _report(values: Mapping[Any, Any]) -> str:
    """Rows by name; of nested mappings the inner names are columns."""
    columns = list(dict.fromkeys(key for row in values.values() if isinstance(row, Mapping) for key in row))
    rows = [["", *map(str, columns)]] if columns else []
    for name, row in values.items():
        cells = [row.get(key, "") for key in columns] if isinstance(row, Mapping) else [row]
        rows.append([str(name), *_cells(cells)])
    width = max(map(len, rows), default=0)
    return _table([row + [""] * (width - len(row)) for row in rows])


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(in_columns(rows))


def _cells(values: Any) -> list[str]:
    return [value if isinstance(value, str) else short(float(value)) for value in values]


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().float().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value
    numbers = isinstance(value, Sequence) and value and all(isinstance(number, int | float) for number in value)
    return np.asarray(value, float) if numbers else None


def _heat_map(matrix: Array) -> Array:
    """Each row by its sum, dark where much is; numbers where they have room; shape ``(height, width)``, from 0 to 1.

    Rows are numbered and called ``true``, columns ``predicted``.
    """
    sums = np.abs(matrix).sum(axis=1, keepdims=True)
    shares = np.abs(matrix) / np.where(sums > 0, sums, 1)
    cell = max(1, SIDE // max(matrix.shape))
    cells = 1.0 - np.kron(shares, np.ones((cell, cell)))
    texts = [[glyphs.brief(float(value)) if np.isfinite(value) else "-" for value in row] for row in matrix]
    longest = max(len(text) for row in texts for text in row)
    for size in (3, 2, 1):
        if glyphs.width_of("0" * longest, size) <= cell - 4 and glyphs.HEIGHT * size <= cell - 4:
            for row, texts_of_row in enumerate(texts):
                for column, text in enumerate(texts_of_row):
                    shade = 1.0 if shares[row, column] > 0.5 else 0.0
                    glyphs.write(cells, text, (row * cell + cell // 2, column * cell + cell // 2), size, shade)
            break
    return _with_axes(cells, matrix.shape, cell)


def _with_axes(cells: Array, shape: Sequence[int], cell: int) -> Array:
    """The cells with the numbers and the names of rows and columns above them and on their left."""
    size, names = 2, ("true", "predicted")
    left, top = glyphs.width_of(names[0], size) + 8, 2 * (glyphs.HEIGHT * size + 6)
    width = max(cells.shape[1], glyphs.width_of(names[1], size))
    picture = np.ones((top + cells.shape[0], left + width))
    picture[top:, left : left + cells.shape[1]] = cells
    picture[top - 1, left - 1 : left + cells.shape[1]] = picture[top - 1 :, left - 1] = 0.5
    glyphs.write(picture, names[1], (glyphs.HEIGHT * size // 2 + 2, left + width // 2), size, 0.0)
    glyphs.write(picture, names[0], (top // 2 + top // 4, left // 2), size, 0.0)
    for count, is_row in zip(shape, (True, False), strict=True):
        apart = (glyphs.HEIGHT if is_row else glyphs.width_of(str(count - 1))) * size + 6
        every = max(1, -(-apart // cell))
        for number in range(0, count, every):
            at = number * cell + cell // 2
            half = (glyphs.HEIGHT if is_row else glyphs.width_of(str(number))) * size // 2 + 1
            if half <= at < count * cell - half:
                centre = (
                    (top + at, left - 4 - glyphs.width_of(str(number), size) // 2) if is_row else (top - 8, left + at)
                )
                glyphs.write(picture, str(number), centre, size, 0.0)
    return picture


def _curve(first: Array, second: Array, thresholds: Array | None = None) -> Array:
    """The line of a curve within the unit square, dark on white; shape ``(SIDE, SIDE)``.

    Of Ignite's curves ROC has as many thresholds as points and its x first; that of precision over recall has a
    threshold less and its y first.
    """
    y_is_first = thresholds is not None and len(thresholds) < len(first)
    x, y = (second, first) if y_is_first else (first, second)
    steps = np.linspace(0, len(x) - 1, max(len(x), 4 * SIDE))
    columns, rows = (np.interp(steps, np.arange(len(axis)), np.nan_to_num(axis)) for axis in (x, y))
    picture = np.ones((SIDE, SIDE))
    picture[[0, -1], :] = picture[:, [0, -1]] = 0.8
    at = [(np.clip(axis, 0, 1) * (SIDE - 1)).round().astype(int) for axis in (1 - rows, columns)]
    picture[at[0], at[1]] = 0.0
    return picture
