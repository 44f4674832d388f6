"""What ``make goodput`` prints and writes, of a run that was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import goodput
from benchmarks.goodput import Measured, table, write


def measured(digest: str = "ab", **seconds: float) -> Measured:
    parts = dict.fromkeys(("downtime_s", "restart_s", "wasted_s"), 0.0) | seconds
    said = {"goodput": 0.96, "wall_s": 600.0, "bound": 0.9, "productive_s": 576.0, **parts}
    points = [(10.0 * step, 50 * step) for step in range(60)]
    return Measured(601.0, {"goodput": said, "weights_sha256": digest, "iteration": 1440}, points)


@pytest.mark.slow
def test_table_tells_kills_losses_and_whether_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, whole = measured(downtime_s=4.0, restart_s=8.0, wasted_s=4.0), measured()
    killed.kills = [(20.0, 1), (50.0, 2)]
    killed.recovered = [0.4, 0.6]
    rows = table(killed, whole)
    assert rows["SIGKILLs"] == "2 in 10.0 min, 1 of both ranks"
    assert rows["an update"] == "400 ms"
    assert rows["lost to the failures"] == "2.7 %, 8.00 s each"
    assert rows["final weights"] == "the bits of the undisturbed run"
    assert table(killed, measured("cd"))["final weights"].startswith("OTHER BITS")

    page, picture = tmp_path / "page.md", tmp_path / "goodput.png"
    page.write_text(goodput.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(goodput, "PAGE", page)
    monkeypatch.setattr(goodput, "PICTURE", picture)
    write(rows, killed, whole)
    write(rows, killed, whole)
    text = page.read_text(encoding="utf-8")
    assert picture.exists() and text.count("| SIGKILLs | 2 in 10.0 min, 1 of both ranks |") == 1
    assert text.count("97 %") == 1 and text.rstrip().endswith("<!-- end -->")
