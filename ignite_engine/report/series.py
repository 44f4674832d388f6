"""The values of one name over a run, in bounded memory however long its log is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

EXACT = 2000
"""Points up to which a series is kept as it was logged; a chart shows as many."""
BUCKETS = 1024
"""A longer series is divided into so many parts and keeps four points of each; a chart has half as many."""

Logged = tuple[int, float]
"""Iteration and value."""


class _Bucket:
    """Some consecutive points: the first, the lowest, the highest and the last of them, and their sums."""

    __slots__ = ("count", "first", "highest", "last", "lowest", "sum_x", "sum_y")

    def __init__(self, point: Logged) -> None:
        self.first = self.lowest = self.highest = self.last = point
        self.count, self.sum_x, self.sum_y = 1, float(point[0]), point[1]

    def add(self, point: Logged) -> None:
        value = point[1]
        if value < self.lowest[1]:
            self.lowest = point
        elif value > self.highest[1]:
            self.highest = point
        self.last = point
        self.count += 1
        self.sum_x += point[0]
        self.sum_y += value

    def join(self, later: _Bucket) -> None:
        self.lowest = min(self.lowest, later.lowest, key=lambda point: point[1])
        self.highest = max(self.highest, later.highest, key=lambda point: point[1])
        self.last = later.last
        self.count += later.count
        self.sum_x += later.sum_x
        self.sum_y += later.sum_y


class Series(Sequence[Logged]):
    """Points ``(iteration, value)`` in order: all of a short log; of a long one every extreme, and the means.

    Of more than ``EXACT`` points it keeps the first, lowest, highest and last of each of at most ``BUCKETS`` equal
    parts of the run. The parts begin at multiples of a power of two, so two series of one run have the same.
    """

    def __init__(self, points: Sequence[Logged] = ()) -> None:
        self._points: list[Logged] = []
        self._buckets: dict[int, _Bucket] = {}
        self._shift = 0
        self.logged = 0
        """How many points were logged; a long series keeps some of them."""
        for point in points:
            self.add(*point)

    def add(self, iteration: int, value: float) -> None:
        self.logged += 1
        if self.logged <= EXACT:
            self._points.append((iteration, value))
            return
        if not self._buckets:
            for point in self._points:
                self._put(point)
        self._put((iteration, value))

    def _put(self, point: Logged) -> None:
        bucket = self._buckets.get(point[0] >> self._shift)
        if bucket is not None:
            bucket.add(point)
            return
        self._buckets[point[0] >> self._shift] = _Bucket(point)
        while len(self._buckets) > BUCKETS:
            self._widen()

    def _widen(self) -> None:
        narrow, self._buckets = self._buckets, {}
        self._shift += 1
        for number, bucket in narrow.items():
            known = self._buckets.setdefault(number >> 1, bucket)
            if known is not bucket:
                known.join(bucket)

    def finish(self, shift: int | None = None) -> int:
        """The log has ended. Returns the power of two of the parts; 0: all points are there.

        Args:
            shift: of the series of this run with the widest parts: the means of all are of the same parts then.
        """
        if self._buckets:
            while shift is not None and self._shift < shift:
                self._widen()
            chosen = [{b.first, b.lowest, b.highest, b.last} for b in self._buckets.values()]
            self._points = [point for points in chosen for point in sorted(points)]
        elif shift:
            for point in self._points:
                number = point[0] >> shift
                if number in self._buckets:
                    self._buckets[number].add(point)
                else:
                    self._buckets[number] = _Bucket(point)
        return self._shift

    @property
    def means(self) -> list[tuple[float, float]]:
        """The mean point of each part; the points themselves where no series of the run is longer than ``EXACT``."""
        if not self._buckets:
            return list(self._points)
        return [(b.sum_x / b.count, b.sum_y / b.count) for b in self._buckets.values()]

    @property
    def mean(self) -> float:
        """The mean of all values."""
        if self._buckets:
            return sum(bucket.sum_y for bucket in self._buckets.values()) / self.logged
        return sum(value for _, value in self._points) / self.logged

    def __len__(self) -> int:
        return len(self._points)

    @overload
    def __getitem__(self, index: int) -> Logged: ...
    @overload
    def __getitem__(self, index: slice) -> list[Logged]: ...
    def __getitem__(self, index: int | slice) -> Logged | list[Logged]:
        return self._points[index]

    def __iter__(self) -> Iterator[Logged]:
        return iter(self._points)

    def __eq__(self, other: object) -> bool:
        return self._points == (other._points if isinstance(other, Series) else other)

    __hash__ = None  # type: ignore[assignment]  # it is mutable, as a list

    def __repr__(self) -> str:
        return repr(self._points)
