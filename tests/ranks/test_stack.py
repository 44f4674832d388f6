"""Where a thread is, read by another one while native threads come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ignite_engine.ranks import signals
from ignite_engine.ranks.stack import Line, Stack, where

OURS = Path(__file__).name

NATIVE_THREADS = """
import ctypes, sys, threading, time
from ignite_engine.ranks import stack

made, asked = stack.Stack(), []

def ask():
    while not asked or time.monotonic() < end:
        asked.append(made.lines())

@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def enter(argument):
    return None

libc, end = ctypes.CDLL(None), time.monotonic() + 3.0
asking = threading.Thread(target=ask)
asking.start()
threads = (ctypes.c_ulong * 8)()
while asking.is_alive():
    for place in range(8):
        libc.pthread_create(ctypes.byref(threads, 8 * place), None, enter, None)
    for thread in threads:
        libc.pthread_join(ctypes.c_ulong(thread), None)
print(len(asked), sum(map(bool, asked)))
"""


def meanwhile(ask: Callable[[], object], work: Callable[[], object]) -> None:
    thread = threading.Thread(target=ask)
    thread.start()
    work()
    thread.join()


def test_native_threads_that_enter_python_meanwhile_do_no_harm() -> None:
    done = subprocess.run([sys.executable, "-c", NATIVE_THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    asked, answered = map(int, done.stdout.split())
    assert answered > 100 and answered > asked / 2


def test_a_thread_that_waits_is_read_where_it_waits_and_goes_on_waiting() -> None:
    made, found, began = Stack(), list[list[Line]](), time.monotonic()

    def ask() -> None:
        time.sleep(0.1)
        found.extend(made.lines() for _ in range(20))

    meanwhile(ask, lambda: time.sleep(0.5))
    assert time.monotonic() - began >= 0.5
    assert all(lines[0].function == "<lambda>" and lines[0].path == __file__ for lines in found) and len(found) == 20
    assert found[0][-1] == found[-1][-1]
    assert where(found[0])[0].startswith(f", in <lambda> ({OURS}:")


def test_the_text_is_a_traceback_with_the_lines_of_source() -> None:
    made, found = Stack(), list[str]()

    def ask() -> None:
        time.sleep(0.1)
        found.append(made.text())

    meanwhile(ask, lambda: time.sleep(0.3))  # this line
    assert found[0].startswith("Thread MainThread:\n")
    assert found[0].endswith("meanwhile(ask, lambda: time.sleep(0.3))  # this line\n")


def test_a_deep_stack_has_its_innermost_hundred_frames() -> None:
    made, found = Stack(), list[list[Line]]()

    def ask() -> None:
        time.sleep(0.1)
        found.append(made.lines())

    def deep(left: int) -> None:
        if left:
            deep(left - 1)
        else:
            time.sleep(0.3)

    meanwhile(ask, lambda: deep(200))
    assert len(found[0]) == 100 and {line.function for line in found[0]} == {"deep"}


def test_a_thread_that_does_not_answer_is_asked_once_and_nothing_is_mixed() -> None:
    made, found = Stack(), list[list[Line]]()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signals.STACK or 0})
    try:
        meanwhile(lambda: found.extend(made.lines() for _ in range(3)), lambda: time.sleep(0.5))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signals.STACK or 0})
    assert found == [[], [], []]
    meanwhile(lambda: found.append(made.lines()), lambda: None)
    assert found[3] and found[3][-1] == made.lines()[-1]


def test_a_thread_of_python_is_asked_as_the_main_thread_is_and_not_when_it_has_ended() -> None:
    made, goes_on = list[Stack](), threading.Event()

    def work() -> None:
        made.append(Stack())
        goes_on.wait()

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    while not made:
        time.sleep(0.01)
    assert "work" in {line.function for line in made[0].lines()}
    goes_on.set()
    thread.join()
    assert made[0].lines() == [] and made[0].text() == ""


def test_a_forked_process_has_stacks_of_its_own() -> None:
    made = Stack()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if Stack().lines()[0].function == "_ask" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert made.lines()


TORCH = os.path.dirname(torch.__file__)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ("", None)),
        ([Line("/a/task.py", "41", "loss_fn")], (", in loss_fn (task.py:41)", None)),
        (
            [Line(f"{TORCH}/nn/modules/linear.py", "9", "forward"), Line("/a/task.py", "4", "f")],
            (", in f (task.py:4)", None),
        ),
        (
            [
                Line(f"{TORCH}/distributed/distributed_c10d.py", "9", "all_reduce"),
                Line(f"{TORCH}/distributed/c10d_logger.py", "9", "wrapper"),
                Line("/a/task.py", "4", "f"),
            ],
            (", in f (task.py:4), in the collective all_reduce", "all_reduce"),
        ),
        (
            [Line(f"{TORCH}/autograd/graph.py", "9", "_engine_run_backward")],
            (", in _engine_run_backward (graph.py:9), in the collective backward", "backward"),
        ),
    ],
)
def test_the_users_line_is_named_and_the_collective(lines: list[Line], expected: tuple[str, str | None]) -> None:
    assert where(lines) == expected
