"""The server that forks the processes of fault tests: each answer is of the child that was asked for."""

from __future__ import annotations

import os
import signal
import time
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
    with pytest.raises(ProcessLookupError):  # it has ended with the server
        os.kill(stuck.pid, 0)


def test_several_children_run_at_a_time(tmp_path: Path) -> None:
    with ForkServer([]) as server:
        slow = server.start("time:sleep", 60, output=tmp_path / "output.txt")
        assert server.call("operator:add", 3, 4, output=tmp_path / "output.txt") == 7
        assert slow.poll() is None
        slow.signal(signal.SIGTERM)
        assert slow.wait(10.0) == -signal.SIGTERM


def test_folder_environment_and_errors_are_those_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"output": tmp_path / "output.txt", "errors": tmp_path / "errors.txt"}
    with ForkServer([]) as server:
        monkeypatch.setenv("SET_LATER", "yes")
        code = "import os, sys; print(os.getcwd(), os.environ['SET_LATER']); sys.exit('an error')"
        server.start("builtins:exec", code, folder=tmp_path, **files).wait(10.0)
    assert files["output"].read_text() == f"{tmp_path} yes\n"
    assert "an error" in files["errors"].read_text()


def test_exit_code_that_comes_with_the_process_number_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child may have ended before this process, on a busy machine, reads its number."""
    with ForkServer([]) as server:
        receive = server.receive

        def receive_late(timeout_s: float | None) -> bool:
            time.sleep(1.0)
            return receive(timeout_s)

        monkeypatch.setattr(server, "receive", receive_late)
        child = server.start("operator:add", 3, 4, output=tmp_path / "output.txt")
        assert child.poll(5.0) == 7


def test_signal_right_after_the_start_ends_the_child(tmp_path: Path) -> None:
    with ForkServer([]) as server:
        for _ in range(20):
            child = server.start("time:sleep", 60, output=tmp_path / "output.txt")
            child.signal(signal.SIGKILL)
            assert child.poll(10.0) == -signal.SIGKILL


def test_server_that_was_killed_begins_again(tmp_path: Path) -> None:
    with ForkServer([]) as server:
        child = server.start("time:sleep", 60, output=tmp_path / "output.txt")
        server._process.kill()
        with pytest.raises(RuntimeError, match="ended with code -9"):
            child.wait(10.0)
        assert server.call("operator:add", 3, 4, output=tmp_path / "output.txt") == 7
        child.signal(signal.SIGKILL)
