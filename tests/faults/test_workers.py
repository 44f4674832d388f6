"""Ctrl-C goes to the whole process group: loader workers outlive it, so that a stop can end at a step boundary."""

import os
import signal

import pytest
from torch.utils.data import DataLoader, Dataset

from ignite_engine import Trainer, loader

STARTED_WITH = []


class Answers(Dataset):
    """Whether each sample's process ignores SIGINT and SIGHUP, and whether the user's own function was called in it."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        ignored = [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGHUP)]
        return os.getpid(), all(ignored), list(STARTED_WITH)


def as_they_are(samples):
    return samples


def answers(data):
    """Of a run over ``data``."""
    got = []
    Trainer(lambda engine, batch: got.extend(batch)).run(data, max_epochs=1)
    return got


@pytest.mark.parametrize("build", [loader, DataLoader], ids=["loader", "plain"])
def test_workers_ignore_ctrl_c(build):
    """A plain loader is rebuilt to resume, and its workers ignore it, too."""
    before = signal.getsignal(signal.SIGINT)
    data = build(Answers(), batch_size=1, num_workers=2, collate_fn=as_they_are, worker_init_fn=STARTED_WITH.append)
    got = answers(data)

    assert [ignored for _, ignored, _ in got] == [True] * 4
    assert [own for _, _, own in got] == [[0], [1]] * 2
    assert len({process for process, *_ in got} - {os.getpid()}) == 2
    assert signal.getsignal(signal.SIGINT) == before != signal.SIG_IGN


def test_training_process_itself_does_not_ignore_it():
    assert answers(loader(Answers(), 1, collate_fn=as_they_are)) == [(os.getpid(), False, [])] * 4
