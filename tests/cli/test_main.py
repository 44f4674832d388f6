"""The start of the command line, before its imports are done."""

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


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_torch_is_imported_ends_the_process_without_a_traceback(tmp_path, ignored):
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL

    done = subprocess.run(
        [sys.executable, "-m", "ignite_engine", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
        capture_output=True,
        text=True,
    )

    if ignored:  # as of a job in the background
        assert done.returncode == 1 and "not interrupted" in done.stderr
    else:
        assert done.returncode == -signal.SIGINT and done.stdout == done.stderr == ""
