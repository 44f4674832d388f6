"""A benchmark is a program of its own: what it sets for its process is put back after each test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp


@pytest.fixture(autouse=True)
def of_the_process() -> Iterator[None]:
    disabled, threads = logging.root.manager.disable, torch.get_num_threads()
    yield
    logging.disable(disabled)
    torch.set_num_threads(threads)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a benchmark need not import torch again."""
    monkeypatch.setattr(mp, "spawn", partial(mp.start_processes, start_method="fork"))
