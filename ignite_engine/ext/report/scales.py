"""Fewer points for a chart."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]


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
