"""The benchmark of loaders runs and measures every contender."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import loading


@pytest.mark.slow
def test_every_contender_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "SETTINGS", {n: s for n, s in loading.SETTINGS.items() if "draws, 2" not in n})
    target = tmp_path / "loading.json"
    assert loading.main(["--rounds", "2", "--samples", "640", "--large", "128", "--json", str(target)]) == 0

    times = json.loads(target.read_text())["us_per_sample"]
    assert set(times) == set(loading.SETTINGS)
    for of in times.values():
        assert {name: len(values) for name, values in of.items()} == {loading.PLAIN: 2, loading.OURS: 2}
    assert capsys.readouterr().out.count("goal") == 2


@pytest.mark.parametrize("kind", [loading.Tiny, loading.Large, loading.InBatches, loading.Drawing])
def test_samples_are_what_they_are_said_to_be(kind: type[loading.Tiny]) -> None:
    sample = kind(4)[3]

    assert sample.numel() * 4 == (100_000 if kind is loading.Large else 8)
    assert hasattr(kind, "__getitems__") == (kind is loading.InBatches)
