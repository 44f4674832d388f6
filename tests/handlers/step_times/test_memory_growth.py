"""Growth is told from garbage, caches that fill, and what is taken once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ignite_engine.handlers.step_times import memory_growth
from ignite_engine.handlers.step_times.memory_growth import MemoryGrowth


def growth_of(
    held_mib: Callable[[int], float], steps: int, monkeypatch: pytest.MonkeyPatch, first_pass: int = 0
) -> MemoryGrowth:
    growth, now = MemoryGrowth(), [0]
    monkeypatch.setattr(memory_growth, "anonymous_mib", lambda: held_mib(now[0]))
    for step in range(1, steps + 1):
        now[0] = step
        if step == first_pass:
            growth.pass_ended()
        if step >= growth.due:
            growth.sample(step)
    return growth


@pytest.mark.parametrize("steps", [40, 1000, 100_000])
@pytest.mark.parametrize("amplitude", [0.0, 30.0])
def test_rate_of_a_leak_is_found_also_under_garbage(
    steps: int, amplitude: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = growth_of(lambda step: 300 + 200 * step / steps + amplitude * (step % 7), steps, monkeypatch).found()
    assert found is not None and found.in_first_pass
    assert found.grown_mib / found.steps == pytest.approx(200 / steps, rel=1.0 if amplitude else 0.01)


@pytest.mark.parametrize(
    "held_mib",
    [
        lambda step: 300.0,
        lambda step: 300.0 + min(step, 500),  # a cache that is full
        lambda step: 300.0 + 100 * (step > 700),  # taken once
        lambda step: 300.0 + 60 * (step % 100) / 100,  # garbage
        lambda step: 900.0 - step / 2,
    ],
)
def test_what_is_no_leak_is_none(held_mib: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> None:
    assert growth_of(held_mib, 1000, monkeypatch).found() is None


def test_first_pass_is_no_sign_where_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    fills = growth_of(lambda step: 300.0 + min(step, 250), 1000, monkeypatch, first_pass=250)
    leaks = growth_of(lambda step: 300.0 + step, 1000, monkeypatch, first_pass=250).found()

    assert fills.found() is None
    assert leaks is not None and not leaks.in_first_pass and leaks.grown_mib == pytest.approx(leaks.steps)


def test_too_few_samples_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert growth_of(lambda step: 300.0 + 10 * step, 9, monkeypatch).found() is None


def test_samples_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def held(step: int) -> float:
        reads.append(step)
        return 300.0

    growth = growth_of(held, 100_000, monkeypatch)
    assert len(growth._samples) <= 128 and len(reads) < 1000
