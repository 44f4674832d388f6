"""A handful of the judge's cases, and that it can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest

from ignite_engine.data import SeededDataset, seeding
from tests.search.seeding_search import run


@pytest.mark.slow
def test_samples_draw_as_if_all_generators_were_seeded_for_each() -> None:
    result = run(0, 60, None)

    assert not result.failures, "\n".join(map(str, result.failures))


def believe_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "_first_draws", lambda count: [ANY] * count)


def believe_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        raw = b"anywhere"

    monkeypatch.setattr(seeding.rng, "numpy_place", Memory)


def keep_what_collate_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    each = seeding.SeededCalls.each

    def kept(self: Any, *arguments: Any, renew: Any = None, **options: Any) -> Any:
        return each(self, *arguments, **options)

    monkeypatch.setattr(seeding.SeededCalls, "each", kept)


def forget_the_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeededDataset, "__getitems__", lambda self, keys: self._batch(keys, None))


@pytest.mark.parametrize("plant", [believe_in_python, believe_in_numpy, keep_what_collate_changed, forget_the_outside])
def test_a_defect_that_is_planted_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    assert any(run(number, 1, None).failures for number in range(40))
