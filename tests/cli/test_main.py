"""``python -m ignite_engine`` as a program of its own, before its imports are done and after."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERRUPTED = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    raise ImportError("cannot be imported")  # as compiled modules make of it
raise ImportError("not interrupted")
"""


def program(folder, *words, **options):
    command = [sys.executable, "-m", "ignite_engine", *words]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_torch_is_imported_ends_the_process_without_a_traceback(ignored, tmp_path):
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    done = program(tmp_path, "--help", preexec_fn=lambda: signal.signal(signal.SIGINT, handler))
    if ignored:  # as of a job in the background
        assert done.returncode == 1 and "not interrupted" in done.stderr
    else:
        assert done.returncode == -signal.SIGINT and done.stdout == done.stderr == ""


@pytest.mark.nightly
def test_a_program_without_anything_else_can_ask(tmp_path):
    done = program(tmp_path, "doctor")
    assert done.returncode == 0 and done.stdout.startswith("ignite-engine"), done.stderr
