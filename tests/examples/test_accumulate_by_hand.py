"""The example runs as described and learns the line."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.commands import Command

ROOT = Path(__file__).resolve().parents[2]


def test_it_learns_the_line(tmp_path: Path) -> None:
    example = Command(tmp_path, str(ROOT / "examples" / "accumulate_by_hand.py"), function="script")
    output, errors = example.communicate()

    assert example.returncode == 0, errors
    first, last, slope, offset = map(float, re.findall(r"-?\d+\.\d+", output))
    assert last < 0.01 * first
    assert abs(slope - 3) < 0.05 and abs(offset + 1) < 0.05
