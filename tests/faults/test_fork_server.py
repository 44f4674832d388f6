"""The server that forks the processes of fault tests: each answer is of the child that was asked for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults import fork_server
from tests.faults.fork_server import ForkServer


def test_answers_stay_in_step_after_a_child_that_was_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "AFTER_SIGKILL_S", 0.0)  # as where the machine is busy, or the kernel holds it
    output = tmp_path / "output.txt"
    with ForkServer([]) as server:
        stuck = server.start("time:sleep", 60, output=output)
        monkeypatch.setattr(stuck, "signal", lambda number: None)
        with pytest.raises(TimeoutError):
            stuck.wait(0.0)
        assert server.call("operator:add", 3, 4, output=output) == 7
        assert server.call("operator:add", 2, 3, output=output) == 5
    os.kill(stuck.pid, signal.SIGKILL)
