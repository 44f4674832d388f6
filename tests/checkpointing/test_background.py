"""A background save: its result, its error, and what it refuses to write."""

from __future__ import annotations

import threading

import pytest
import torch

from ignite_engine.checkpointing import BackgroundSave, Snapshot
from ignite_engine.checkpointing.background import ChangedWhileCopied


def taken(weight: torch.Tensor) -> tuple[Snapshot, torch.Tensor]:
    snapshot = Snapshot()
    return snapshot, snapshot.take(weight, lambda tensor: True)


def test_the_result_is_that_of_the_writing_thread() -> None:
    done = threading.Event()
    snapshot, copy = taken(torch.ones(3))
    save = BackgroundSave(snapshot, lambda: copy.sum().item(), done.set)
    assert save.result() == 3.0 and done.is_set() and save.seconds > 0 and save.wait(0)


def test_an_error_of_the_writing_thread_is_raised_by_the_result() -> None:
    done = threading.Event()
    save = BackgroundSave(taken(torch.ones(3))[0], lambda: 1 // 0, done.set)
    with pytest.raises(ZeroDivisionError):
        save.result()
    assert done.is_set()


def test_the_source_may_change_once_the_copy_is_made() -> None:
    weight, go = torch.ones(3), threading.Event()
    snapshot, copy = taken(weight)
    save = BackgroundSave(snapshot, lambda: go.wait(30) and copy.tolist())
    save.before_change()
    weight.zero_()
    save.before_change()
    go.set()
    assert save.result() == [1.0, 1.0, 1.0]


def test_a_source_that_changed_before_is_not_written() -> None:
    weight, written = torch.ones(3), list[str]()
    snapshot, _ = taken(weight)
    weight.zero_()
    save = BackgroundSave(snapshot, lambda: written.append("torn"))
    with pytest.raises(ChangedWhileCopied, match="changed outside of its step while it was copied"):
        save.result()
    assert written == []


def test_waiting_has_a_limit() -> None:
    go = threading.Event()
    save = BackgroundSave(taken(torch.ones(1))[0], lambda: go.wait(30))
    assert not save.wait(0.01)
    go.set()
    assert save.wait(30)
