"""What a process runs with, and which of it decides the bits."""

from __future__ import annotations

import subprocess
import sys

from ignite_engine.checkpointing.environment import environment_values, inexact_reasons


def test_no_process_is_started() -> None:
    """It is asked in the thread of a background save, while the main thread may fork loader workers."""
    script = """
import subprocess
from ignite_engine.checkpointing.environment import environment_values
def refuse(*_, **__): raise AssertionError("a process was started")
subprocess.Popen.__init__ = refuse
assert environment_values(1)["platform"]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_another_number_of_ranks_or_threads_is_a_reason() -> None:
    saved = environment_values(2)
    now = environment_values(1) | {"threads": saved["threads"] + 1, "working_directory": "elsewhere"}

    assert inexact_reasons(saved, now) == [
        "ranks: 2 when it was saved, 1 now",
        f"threads: {saved['threads']} when it was saved, {saved['threads'] + 1} now",
    ]
    assert inexact_reasons({}, now) == []
