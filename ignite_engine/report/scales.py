"""Numbers on an axis: round ticks, and fewer points that keep every extreme."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """At most ``count`` + 1 round values (1, 2 or 5 times a power of ten apart) from ``low`` to ``high``."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Powers of ten from ``low`` to ``high``, with 2 and 5 between them where there are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**exponent for exponent in exponents if low <= 10.0**exponent <= high]
    if len(powers) < 3:
        finer = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
        return [value for value in finer if low <= value <= high]
    return powers[:: math.ceil(len(powers) / (count + 1))]


def thin(points: Sequence[Point], buckets: int) -> list[Point]:
    """The first, the lowest, the highest and the last point of each of ``buckets`` equal parts of the range, in order.

    So no extreme is lost, and the curve looks as the whole would at that many pixels.
    """
    if len(points) <= 4 * buckets:
        return list(points)
    low, high = points[0][0], points[-1][0]
    width = (high - low) / buckets or 1.0
    parts: dict[int, list[Point]] = {}
    for point in points:
        parts.setdefault(min(int((point[0] - low) / width), buckets - 1), []).append(point)
    kept: list[Point] = []
    for part in parts.values():
        chosen = {part[0], min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1]), part[-1]}
        kept.extend(sorted(chosen))
    return kept


def averaged(points: Sequence[Point], buckets: int) -> list[Point]:
    """The mean point of each of ``buckets`` equal parts of the range; all points where there are few."""
    if len(points) <= buckets:
        return list(points)
    low, high = points[0][0], points[-1][0]
    width = (high - low) / buckets or 1.0
    parts: dict[int, list[Point]] = {}
    for point in points:
        parts.setdefault(min(int((point[0] - low) / width), buckets - 1), []).append(point)
    return [
        (sum(point[0] for point in part) / len(part), sum(point[1] for point in part) / len(part))
        for part in parts.values()
    ]
