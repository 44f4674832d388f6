"""Where a thread is, read by another one while native threads come and go."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ignite_engine.ranks import signals, stack
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


@pytest.fixture(autouse=True)
def no_stack_is_left() -> Iterator[None]:
    yield
    for made in list(stack._file.stacks if stack._file is not None else ()):
        made.close()
    Stack().close()


def meanwhile(ask: Callable[[], object], work: Callable[[], object]) -> None:
    thread = threading.Thread(target=ask)
    thread.start()
    work()
    thread.join()


@pytest.mark.slow
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
        found.append(made.text(made.lines()))

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
    assert made[0].lines() == [] and made[0].text([]) == ""


def test_a_forked_process_has_stacks_of_its_own() -> None:
    made = Stack()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if Stack().lines()[0].function == "_ask" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert made.lines()


def in_child(work: Callable[[], object]) -> int:
    """The exit code of a process forked from here that only does ``work``; 1: it raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def asked(made: Stack) -> list[Line]:
    found = list[list[Line]]()

    def ask() -> None:
        time.sleep(0.02)
        found.append(made.lines())

    meanwhile(ask, lambda: time.sleep(0.05))
    return found[0]


def handled() -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) >> ((signals.STACK or 0) - 1) & 1)


def test_the_last_stack_leaves_no_descriptor_and_no_handler(tmp_path: Path) -> None:
    def work() -> None:
        before = os.listdir("/proc/self/fd")
        for _ in range(2):
            first, second = Stack(), Stack()
            first.close()
            assert handled() and asked(second) and not asked(first)
            second.close()
            assert os.listdir("/proc/self/fd") == before and not handled()

    assert in_child(work) == 0


def test_the_handler_stays_where_an_answer_is_to_come() -> None:
    def work() -> None:
        made = Stack()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signals.STACK or 0})
        assert asked(made) == []
        made.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signals.STACK or 0})
        made = Stack()
        assert asked(made)
        made.close()
        assert not handled()

    assert in_child(work) == 0


@pytest.mark.parametrize("reused", [False, True])
def test_a_descriptor_that_the_users_code_has_closed_is_not_written_to(tmp_path: Path, reused: bool) -> None:
    def work() -> None:
        made = Stack()
        (number,) = filter(is_a_stack, os.listdir("/proc/self/fd"))
        os.close(int(number))
        if reused:
            assert os.open(tmp_path / "weights", os.O_RDWR) == int(number)
        assert asked(made) == []
        made.close()
        assert not reused or os.fstat(int(number))

    (tmp_path / "weights").write_text("precious")
    assert in_child(work) == 0
    assert (tmp_path / "weights").read_text() == "precious"


def is_a_stack(entry: str) -> bool:
    try:
        return "memfd:stack" in os.readlink(f"/proc/self/fd/{entry}")
    except OSError:
        return False


def test_where_the_system_refuses_a_file_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", refuse)

    def work() -> None:
        assert asked(Stack()) == []

    assert in_child(work) == 0


def test_a_handler_of_another_library_stays(tmp_path: Path) -> None:
    def work() -> None:
        with (tmp_path / "theirs").open("w") as theirs:
            faulthandler.register(signals.STACK or 0, theirs, all_threads=False)
            assert asked(Stack()) == []
            os.kill(os.getpid(), signals.STACK or 0)

    assert in_child(work) == 0
    assert "in work" in (tmp_path / "theirs").read_text()


def test_stacks_of_two_threads_are_asked_for_at_once_and_are_not_mixed() -> None:
    made, goes_on, ends_at = [Stack()], threading.Event(), time.monotonic() + 0.5
    outermost = [set[str](), set[str]()]

    def work() -> None:
        made.append(Stack())
        goes_on.wait()

    def ask(number: int) -> None:
        while time.monotonic() < ends_at:
            if len(made) > number:
                outermost[number].add(next((line.function for line in reversed(made[number].lines())), ""))

    threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
    threads[0].start()
    watched = threading.Thread(target=work)
    watched.start()
    threads[1].start()
    for thread in threads:
        thread.join()
    goes_on.set()
    watched.join()
    assert outermost[1] - {""} == {"_bootstrap"} and outermost[0] - {""} == {made[0].lines()[-1].function}


UNKNOWN_THREADS = """
import _thread, threading, time
from ignite_engine.ranks.stack import Stack

made = []
for number in range(30):
    _thread.start_new_thread(lambda: made.append(Stack()), ())
    while len(made) <= number:
        time.sleep(0.01)
time.sleep(0.1)
for number in range(5):
    threading.Thread(target=time.sleep, args=(0.1,)).start()
print([stack.lines() for stack in made] == [[]] * 30)
"""


@pytest.mark.slow
def test_a_thread_that_python_has_not_started_is_not_asked_as_it_may_have_ended() -> None:
    done = subprocess.run([sys.executable, "-c", UNKNOWN_THREADS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_names_that_are_not_ascii_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "josé").mkdir()
    path = tmp_path / "josé" / "训练.py"
    path.write_text("def prüfe(sleep):\n    sleep(0.1)  # ü\n", encoding="utf-8")
    names = dict[str, Callable[[Callable[[float], None]], None]]()
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), names)  # type: ignore[arg-type]
    made, found, texts = Stack(), list[Line](), list[str]()

    def ask() -> None:
        time.sleep(0.03)
        found.extend(made.lines())
        texts.append(made.text(made.lines()))

    meanwhile(ask, lambda: names["prüfe"](time.sleep))
    assert where(found) == (", in prüfe (训练.py:2)", None)
    assert texts[0].endswith(f'  File "{path}", line 2, in prüfe\n    sleep(0.1)  # ü\n')
    monkeypatch.setattr(stack, "_COLLECTIVES", (f"{path.parent}{os.sep}",))  # as where torch is installed there
    assert where(found)[1] == "prüfe"


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
