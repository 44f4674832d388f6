"""The benchmark of a long log interval saves at both ends and logs once, the mean of all losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import long_interval
from ignite_engine import Trainer
from ignite_engine.handlers import MetricLogger

SMALL = ["--iterations", "400", "--saves", "2"]


def test_saves_of_both_ends_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert long_interval.main([*SMALL, "--directory", str(tmp_path), "--json", str(target)]) == 0
    report = json.loads(target.read_text())

    assert len(report["rss_mib"]) == 10 - 1 and min(report["rss_mib"]) > 0  # the last tenth ends with the log point
    assert {len(each) for each in report["save_s"].values()} == {2} and len(report["logged"]) == 1
    assert min(min(each) for each in report["bytes"].values()) > 1000
    assert capsys.readouterr().out.count("goal") == 3 == len(report["goals"])


@pytest.mark.slow
def test_what_a_checkpoint_grows_by_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where every output was kept until the log point."""
    kept: list[float] = []
    plain, state_of = long_interval._loss_of, MetricLogger.state_dict

    def grown(self: MetricLogger) -> dict[str, object]:
        return state_of(self) | {"kept": list(kept)}

    def loss_of(trainer: Trainer) -> float:
        kept.append(0.1)
        return plain(trainer)

    monkeypatch.setattr(MetricLogger, "state_dict", grown)
    monkeypatch.setattr(
        long_interval, "_loss_of", lambda trainer: kept.append(0.1) or float(trainer.state.output["loss"])
    )
    found = long_interval.measure(2000, 2, tmp_path)
    assert found.bytes[long_interval.LAST][-1] > 1.5 * found.bytes[long_interval.FIRST][0]


def test_a_logged_value_that_is_not_the_mean_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = long_interval._loss_of
    monkeypatch.setattr(long_interval, "_loss_of", lambda trainer: 1.01 * plain(trainer))
    with pytest.raises(RuntimeError, match="where the mean of all losses is"):
        long_interval.measure(100, 1, tmp_path)
