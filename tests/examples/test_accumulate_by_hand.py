"""The example runs as described and learns the line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_learns_the_line() -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "accumulate_by_hand.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert result.returncode == 0, result.stderr
    first, last, slope, offset = map(float, re.findall(r"-?\d+\.\d+", result.stdout))
    assert last < 0.01 * first
    assert abs(slope - 3) < 0.05 and abs(offset + 1) < 0.05
