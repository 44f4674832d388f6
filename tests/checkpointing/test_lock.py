"""A lock ends with whoever took it, and with nothing else."""

import os
import signal
import threading
import time

import pytest

from ignite_engine.checkpointing.lock import InUse, lock
from tests.kit.faults import in_child, start_child, wait_for


def forked(work):
    """The number of a process that does this alone; unlike a child of ``start_child`` it is not heard."""
    process = os.fork()
    if process == 0:
        work()
        os._exit(0)
    return process


def is_free(path, shared=False):
    try:
        with lock(path, shared=shared) as is_locked:
            return is_locked
    except InUse:
        return False


def free_for_another_process(path, shared=False):
    free = in_child(lambda: is_free(path, shared))[1]
    return free


def test_closing_the_file_or_locking_it_twice_does_not_free_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    with lock(path):
        with lock(path, again=True), lock(path, shared=True, again=True):
            path.read_text()
        assert not is_free(path) and not free_for_another_process(path)
    assert free_for_another_process(path)


def test_it_is_shared_or_held_alone_by_one_thread(tmp_path):
    with lock(tmp_path, shared=True):
        assert free_for_another_process(tmp_path, shared=True) and not free_for_another_process(tmp_path)
        assert not is_free(tmp_path)
    answers = []
    with lock(tmp_path):
        thread = threading.Thread(target=lambda: answers.append(is_free(tmp_path, shared=True)))
        thread.start()
        thread.join()
    assert answers == [False] and is_free(tmp_path)


@pytest.mark.parametrize("killed", [False, True])
def test_a_forked_process_neither_keeps_nor_frees_it(tmp_path, killed):
    def hold():
        with lock(tmp_path):
            assert in_child(lambda: None) == (0, None)
            worker = forked(signal.pause)
            assert not free_for_another_process(tmp_path)
            (tmp_path / "held").write_text(f"{worker}")
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "free").touch()

    _, status = os.waitpid(forked(hold), 0)
    worker = int((tmp_path / "held").read_text())
    os.kill(worker, 0)  # it lives
    free = free_for_another_process(tmp_path)
    os.kill(worker, signal.SIGKILL)
    assert free and os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if killed else 0)


def test_a_file_of_its_own_names_the_holder_and_goes_with_it(tmp_path):
    path = tmp_path / ".lock"

    def asked():
        try:
            with lock(path, own_file=True):
                return ""
        except InUse as holder:
            return str(holder)

    with lock(path, own_file=True):
        with lock(path, again=True, own_file=True):
            pass
        assert in_child(asked)[1].startswith(f"process {os.getpid()} on ")
        path.rename(tmp_path / "moved")
        path.touch()
    assert path.exists(), "another one at its place stays"


def test_it_is_waited_for(tmp_path):
    def hold():
        with lock(tmp_path):
            (tmp_path / "held").touch()
            time.sleep(0.3)

    child = start_child(hold)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(InUse), lock(tmp_path):
        pass
    with lock(tmp_path, wait_s=60) as is_locked:
        assert is_locked
    wait_for(child)
