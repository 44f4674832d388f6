"""A background save: its result, its error, and how long it is waited for."""

import threading

import pytest

from ignite_engine.checkpointing import BackgroundSave


def test_the_result_is_that_of_the_writing_thread():
    done = threading.Event()
    save = BackgroundSave(lambda: 3.0, done.set)
    assert save.result() == 3.0 and done.is_set() and save.seconds > 0 and save.wait(0)


def test_an_error_of_the_writing_thread_is_raised_by_the_result():
    done = threading.Event()
    save = BackgroundSave(lambda: 1 // 0, done.set)
    with pytest.raises(ZeroDivisionError):
        save.result()
    assert done.is_set()


def test_waiting_has_a_limit():
    go = threading.Event()
    save = BackgroundSave(lambda: go.wait(30))
    assert not save.wait(0.01)
    go.set()
    assert save.wait(30)
