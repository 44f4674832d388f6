"""The engine on a POSIX system that is not Linux, as far as one that is can show it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.long
@pytest.mark.distributed
def test_it_trains_saves_stops_and_resumes_without_what_only_linux_has(tmp_path: Path) -> None:
    paths = [str(FOLDER), str(FOLDER.parents[1])]
    command = [sys.executable, str(FOLDER / "program.py"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, cwd=tmp_path)

    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == '["completed", "completed"]'
    assert "AttributeError" not in done.stderr and "/proc" not in done.stderr, done.stderr
