"""``Parallel(restarts=...)`` and ``fit(restarts=...)`` in Python: what is forked, and what is refused in one line."""

import os
import signal
import sys
import time

import psutil
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import Parallel, Trainer, Update, fit, loader
from ignite_engine.config import ConfigError
from ignite_engine.errors import Interrupted, LaunchError
from ignite_engine.ext.recovery import forking
from ignite_engine.handlers import Checkpoint

pytestmark = pytest.mark.faults


def once(marker):
    """Whether it is asked for the first time, in whatever process."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class DieOnce:
    def __init__(self, marker, number, at=7):
        self.marker, self.number, self.at = marker, number, at

    def __call__(self, trainer):
        if trainer.state.iteration == self.at and once(self.marker):
            os.kill(os.getpid(), self.number)


def data():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(80, 8, generator=generator), torch.randint(0, 3, (80,), generator=generator)


def model():
    torch.manual_seed(1)
    return nn.Linear(8, 3)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def fitted(folder, net, *handlers, **arguments):
    quiet = {"report": False, "console": False, "progress": False}
    options = {"max_epochs": 4, "batch_size": 8, "checkpoint": {"every": 3}, "logging": quiet}
    pairs = [(handler, Events.ITERATION_STARTED) for handler in handlers]
    return fit(net, loss_fn, data(), directory=folder, handlers=pairs, **options, **arguments)


@pytest.mark.slow
def test_fit_goes_on_and_has_what_its_process_has_trained(tmp_path):
    whole, restarted = model(), model()
    expected = fitted(tmp_path / "whole", whole)
    run = fitted(tmp_path / "run", restarted, DieOnce(tmp_path / "died", signal.SIGSEGV), restarts=2)

    assert torch.equal(whole.weight, restarted.weight)
    assert run.summary["weights_sha256"] == expected.summary["weights_sha256"]
    assert run.metrics["loss"] == expected.metrics["loss"] and run.trainer.state.iteration == 40
    assert (tmp_path / "died").exists()


@pytest.mark.row("K2")
def test_parent_that_has_computed_on_several_threads_forks_ranks_that_compute(tmp_path):
    """GNU's OpenMP would wait for ever in them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (torch.randn(600, 600) @ torch.randn(600, 600)).relu().sum().item()

        def compute(local_rank):
            signal.alarm(30)
            weight = torch.randn(600, 600, requires_grad=True)
            (weight @ weight).relu().sum().backward()
            (tmp_path / "done").touch()

        Parallel(restarts=1).run(compute)
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "done").exists()


def trained(local_rank, folder, marker, number):
    net = model()
    trainer = Trainer(Update(net, torch.optim.SGD(net.parameters(), lr=0.1), loss_fn))
    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=1))
    trainer.add_event_handler(Events.ITERATION_STARTED, DieOnce(marker, number))
    checkpoint.resume()
    trainer.run(loader(torch.utils.data.TensorDataset(*data()), batch_size=8), max_epochs=2)
    (folder.parent / "started_at").write_text(f"{trainer.state.start.value} {os.environ['TORCHELASTIC_RESTART_COUNT']}")


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "gloo"])
def test_program_of_its_own_resumes_at_the_iteration_that_died(tmp_path, backend, caplog):
    with Parallel(backend, restarts=1) as parallel:
        parallel.run(trained, tmp_path / "checkpoints", tmp_path / "died", signal.SIGBUS)
    assert (tmp_path / "started_at").read_text() == "resumed 1"
    assert "was killed by SIGBUS in iteration 7. Restart 1, of at most 1 in an hour." in caplog.text


@pytest.mark.slow
def test_error_and_exit_of_the_function_are_those_of_parallel(tmp_path):
    def fail(local_rank):
        raise ZeroDivisionError("of the program")

    with pytest.raises(ProcessRaisedException, match="ZeroDivisionError: of the program"):
        Parallel(restarts=3).run(fail)
    with pytest.raises(SystemExit) as end:
        Parallel(restarts=3).run(lambda local_rank: sys.exit(7))
    assert end.value.code == 7

    def die(local_rank):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        ProcessExitedException, match=r"SIGKILL before its first iteration\. The run ends: it was start"
    ) as killed:
        Parallel(restarts=1).run(die)
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
    def stop(trainer):
        if trainer.state.iteration == 5:
            os.kill(os.getppid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as end:
        fitted(tmp_path / "run", model(), stop, restarts=2)
    assert end.value.code == 128 + signal.SIGTERM


def test_parent_that_has_used_an_accelerator_is_refused(monkeypatch):
    monkeypatch.setattr(forking.devices, "in_use", lambda: torch.device("cuda:1"))
    with pytest.raises(LaunchError, match=r"^restarts forks the ranks, and this process has used cuda:1 already"):
        Parallel(restarts=1).run(print)


def test_launcher_restarts_its_ranks_itself(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("RANK", "0")
    Parallel(restarts=1)
    assert "restarts has no effect: the launcher that started this rank restarts it." in caplog.text
    with pytest.raises(ConfigError, match=r"^fit\(\): restarts: got a number on ranks that are started elsewhere"):
        fitted(tmp_path / "run", model(), restarts=1)
