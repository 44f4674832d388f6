"""Loader workers leave signals to the training process, and never outlive it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ignite_engine.data.workers import WorkerInit, begin_pass, end_workers
from tests.faults.commands import program

PROGRAM = """
import os, sys, time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from ignite_engine import loader

class Slow:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        Path(sys.argv[1], str(os.getpid())).touch()
        while True:  # no SIGTERM of anybody but its trainer ends it
            time.sleep(60)

if __name__ == "__main__":
    context = sys.argv[2]
    next(iter(loader(Slow(), num_workers=2, multiprocessing_context=context)))
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    "context",
    # slow: these import torch
    ["fork", pytest.param("spawn", marks=pytest.mark.long), pytest.param("forkserver", marks=pytest.mark.long)],
)
def test_busy_workers_end_when_their_trainer_is_killed(context, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    trainer = program(tmp_path, PROGRAM, str(pids), context)
    assert wait_until(lambda: len(list(pids.iterdir())) == 2)
    workers = [int(path.name) for path in pids.iterdir()]
    try:
        for worker in workers:
            os.kill(worker, signal.SIGTERM)  # a launcher's, to the whole group: the trainer is to end them
        time.sleep(0.3)
        assert all(map(alive, workers))
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
        assert wait_until(lambda: not any(map(alive, workers)), seconds=20)
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)


def test_data_without_workers_is_left_alone():
    data = [1, 2]
    iterator = begin_pass(data)
    end_workers(iterator, data)

    assert list(iterator) == data


class WithOwnWorkers:
    """An iterator of a user's with attributes of torch's names."""

    _workers: Any = 2

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration

    def _shutdown_workers(self):
        raise AssertionError("it is not asked")


def test_an_iterator_of_a_users_is_left_alone_whatever_its_attributes_are():
    data = WithOwnWorkers()
    end_workers(begin_pass(data), data)


class Around:
    """Data of a user's around a loader whose workers persist."""

    def __init__(self):
        self.loader = DataLoader([1, 2, 3], batch_size=None, num_workers=1, persistent_workers=True)

    def __iter__(self):
        return iter(self.loader)


def test_persistent_workers_of_a_loader_within_the_data_are_asked_again():
    data = Around()
    iterator = begin_pass(data)
    assert next(iterator) == 1
    end_workers(iterator, data)
    assert list(begin_pass(data)) == [1, 2, 3]
    end_workers(data.loader._iterator, data.loader)
    assert data.loader._iterator is None and list(begin_pass(data)) == [1, 2, 3]
    end_workers(data.loader._iterator, data.loader)


class TellsWhatIsBlocked:
    """Data over which an iteration gives the signals that were blocked when it began."""

    def __init__(self, worker_init_fn):
        self.worker_init_fn = worker_init_fn

    def __iter__(self):
        return iter(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_signals_are_blocked_while_workers_start_that_let_them_in_again_and_no_others():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    asking_to_stop = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

    assert set(begin_pass(TellsWhatIsBlocked(WorkerInit(None)))) == before | asking_to_stop
    for others in (None, print):
        assert set(begin_pass(TellsWhatIsBlocked(others))) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
