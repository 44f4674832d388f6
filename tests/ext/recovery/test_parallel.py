"""``Parallel(restarts=...)`` and ``fit(restarts=...)`` in Python: what is forked, and what is refused in one line."""

import os
import signal
import sys
import time

import psutil
import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import Parallel
from ignite_engine.errors import Interrupted, LaunchError
from ignite_engine.runs.config import ConfigError
from tests.ext.recovery.deaths import Death, Deaths
from tests.kit.fitting import at, digest, fitted, net
from tests.kit.processes import child
from tests.kit.refusals import refusals
from tests.kit.tiny import one


def test_fit_goes_on_and_has_what_its_process_has_trained(tmp_path):
    whole, restarted, dies = net(), net(), Deaths(tmp_path, [Death(7)])
    expected = fitted(tmp_path / "whole", model=whole)
    handlers = [at(7, lambda trainer: dies.at(trainer, "ITERATION_COMPLETED"))]
    run = fitted(tmp_path / "run", model=restarted, handlers=handlers, restarts=2)

    assert torch.equal(one(whole), one(restarted)) and digest(run) == digest(expected)
    assert run.metrics["loss"] == expected.metrics["loss"] and run.trainer.state.iteration == 18
    assert list(tmp_path.glob("died_*"))


@pytest.mark.row("K2")
def test_parent_that_has_computed_on_several_threads_forks_ranks_that_compute(tmp_path):
    """GNU's OpenMP would wait for ever in them."""

    def compute(local_rank):
        signal.alarm(30)
        weight = torch.randn(600, 600, requires_grad=True)
        (weight @ weight).relu().sum().backward()
        (tmp_path / "done").touch()

    def program():
        torch.set_num_threads(2)
        (torch.randn(600, 600) @ torch.randn(600, 600)).relu().sum().item()
        Parallel(restarts=1).run(compute)

    child(program)
    assert (tmp_path / "done").exists()


@pytest.mark.nightly
def test_error_and_exit_of_the_function_are_those_of_parallel():
    def fail(local_rank):
        raise ZeroDivisionError("of the program")

    with pytest.raises(ProcessRaisedException, match="ZeroDivisionError: of the program"):
        Parallel(restarts=3).run(fail)
    with pytest.raises(SystemExit) as end:
        Parallel(restarts=3).run(lambda local_rank: sys.exit(7))
    assert end.value.code == 7

    with pytest.raises(ProcessExitedException, match="SIGKILL before its first iteration") as killed:
        Parallel(restarts=1).run(lambda local_rank: os.kill(os.getpid(), signal.SIGKILL))
    assert [entry.name for entry in killed.traceback[1:]] == ["run"]


@pytest.mark.row("K2")
def test_rank_that_is_killed_when_a_peer_has_stopped_is_not_started_again(tmp_path):
    def stop(local_rank):
        (tmp_path / f"{local_rank}_{os.getpid()}").touch()
        if local_rank == 0:
            sys.exit(128 + signal.SIGTERM)
        while not (peers := list(tmp_path.glob("0_*"))):
            time.sleep(0.01)
        while psutil.pid_exists(int(peers[0].name.removeprefix("0_"))):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ProcessExitedException, match=r"^Rank 1 \(process \d+\) was killed by SIGKILL\.$"):
        Parallel("gloo", nproc_per_node=2, restarts=3).run(stop)
    assert len(list(tmp_path.iterdir())) == 2


def test_stopped_fit_raises_interrupted(tmp_path):
    terminate = at(5, lambda trainer: os.kill(os.getppid(), signal.SIGTERM))
    with pytest.raises(Interrupted) as end:
        fitted(tmp_path, handlers=[terminate], restarts=2, max_epochs=50)
    assert end.value.code == 128 + signal.SIGTERM


def with_an_accelerator():
    """As where this process has used one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 1)
        Parallel(restarts=1).run(print)


def under_a_launcher(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        fitted(folder, restarts=1)


test_refusals = refusals(
    [
        ("a parent that has used an accelerator", with_an_accelerator, LaunchError, "restarts forks cuda used"),
        ("ranks that are started elsewhere", under_a_launcher, ConfigError, "fit restarts elsewhere"),
        ("no restarts", lambda: Parallel(restarts=0), ValueError, "restarts at least 1"),
        ("spawned ranks", lambda: Parallel(start_method="spawn", restarts=1), TypeError, "start_method restarts"),
    ]
)


def test_launcher_restarts_its_ranks_itself(monkeypatch, caplog):
    monkeypatch.setenv("RANK", "0")
    Parallel(restarts=1)
    assert "restarts has no effect" in caplog.text
