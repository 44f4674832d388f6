"""A long series keeps every extreme, its ends and its means, in bounded memory."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from pathlib import Path

import pytest

from ignite_engine.report import read_run, write_report
from ignite_engine.report.series import BUCKETS, EXACT, Series


def points(count: int, step: int = 1) -> list[tuple[int, float]]:
    random.seed(3)
    return [(n * step, random.gauss(0.0, 1.0)) for n in range(1, count + 1)]


def finished(logged: list[tuple[int, float]]) -> Series:
    series = Series(logged)
    series.finish()
    return series


@pytest.mark.parametrize("count", [1, 2, EXACT])
def test_a_short_series_is_as_it_was_logged(count: int) -> None:
    logged = points(count)
    series = finished(logged)

    assert series == logged and series.means == logged and len(series) == count
    assert series.mean == pytest.approx(sum(value for _, value in logged) / count)


@pytest.mark.parametrize(("count", "step"), [(EXACT + 1, 1), (30_000, 7), (100_000, 1)])
def test_a_long_series_keeps_ends_extremes_and_mean(count: int, step: int) -> None:
    logged = points(count, step)
    series = finished(logged)

    assert BUCKETS / 2 < len(series.means) <= BUCKETS and len(series) <= 4 * BUCKETS
    assert set(series) <= set(logged) and list(series) == sorted(series)
    assert (series[0], series[-1]) == (logged[0], logged[-1])
    for extreme in (min, max):
        assert extreme(series, key=lambda point: point[1]) == extreme(logged, key=lambda point: point[1])
    assert series.mean == pytest.approx(sum(value for _, value in logged) / count)
    width = logged[-1][0] / BUCKETS
    highest = max((p for p in logged if 4 * width <= p[0] < 8 * width), key=lambda point: point[1])
    assert any(highest[1] <= value for at, value in series if 2 * width <= at < 10 * width)


def test_means_of_a_shorter_series_are_of_the_same_parts(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for n in range(1, 10_001):
            parts = {"time/step_ms": 10.0, "time/forward_ms": 6.0, "time/backward_ms": 4.0 if n > 9_000 else None}
            file.write(json.dumps({"iteration": n, **parts}) + "\n")
    run = read_run(tmp_path)
    whole, short = dict(run.means("time/step_ms")), dict(run.means("time/backward_ms"))

    assert len(run.series["time/backward_ms"]) == 1000 and len(short) < 120
    assert len(short.keys() & whole.keys()) >= len(short) - 1  # its first part may be one that it was logged in half


@pytest.mark.slow
def test_a_page_of_a_long_log_takes_little_memory(tmp_path: Path) -> None:
    """100,000 lines as lists of tuples were 48 MiB; with 1,000,000 lines it was more than a GiB."""
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for n in range(1, 100_001):
            file.write(f'{{"iteration": {n}, "epoch": {1 + n // 1000}, "loss": {math.sin(n)}, "lr": 0.1}}\n')
    tracemalloc.start()
    try:
        page = write_report(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert page.stat().st_size < 2**20
    assert peak < 12 * 2**20
