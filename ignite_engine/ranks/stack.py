"""Where a thread is: its stack, which it writes itself, in a signal handler of :mod:`faulthandler`.

No other thread reads it: frames and thread states of one that runs, or of C++ that enters Python just then, cannot be
read from outside without a crash now and then. In CPython 3.11 both ``sys._current_frames`` and
``faulthandler.dump_traceback`` have ended ranks so. Where there are no real-time signals (macOS) nothing is known.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import ignite
import numpy
import torch

from ignite_engine.ranks import signals

_MAY_TAKE_S = 0.1
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_COLLECTIVES = (_TORCH + os.path.join("distributed", ""), _TORCH + os.path.join("nn", "parallel", ""))
_PYTHON = os.path.join(os.path.dirname(os.__file__), "")
_files: dict[int, int] = {}
_LIBRARIES = (
    _TORCH,
    os.path.join(os.path.dirname(ignite.__file__), ""),
    os.path.join(os.path.dirname(numpy.__file__), ""),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
)


class Line(NamedTuple):
    """Where a thread is: a line of a stack."""

    path: str
    number: str
    function: str

    def is_in(self, *folders: str) -> bool:
        return self.path.startswith(folders)


class Stack:
    """The stack of the thread that makes it, for others to ask for.

    The handler stays when it is gone: a signal that is on its way would end the process.
    """

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self._lock = threading.Lock()
        self._asked = False
        self._file = _file()
        self._first: Line | None = None
        if self._file is not None:
            self._ask(self._file)  # of itself: answered before it returns
            self._first, self._asked = next(reversed(_parsed(_text(self._file))), None), False

    def lines(self) -> list[Line]:
        """The innermost line first; empty where the thread does not answer within 0.1 s."""
        with self._lock:
            if self._file is None or self._first is None or not self.thread.is_alive():
                return []
            if not self._asked:
                self._ask(self._file)
            deadline = time.monotonic() + _MAY_TAKE_S
            while not (found := self._answer(self._file)) and time.monotonic() < deadline:
                time.sleep(0.0005)
            self._asked = not found  # else what it writes later would be mixed with the next
            return found

    def text(self) -> str:
        """As Python prints it, the innermost line last."""
        texts = []
        for line in reversed(self.lines()):
            source = linecache.getline(line.path, int(line.number)).strip() if line.number.isdigit() else ""
            texts.append(f'  File "{line.path}", line {line.number}, in {line.function}\n')
            texts += [f"    {source}\n"] if source else []
        return f"Thread {self.thread.name}:\n{''.join(texts)}" if texts else ""

    def _ask(self, file: int) -> None:
        os.lseek(file, 0, os.SEEK_SET)
        os.ftruncate(file, 0)
        self._asked = True
        assert self.thread.ident is not None and signals.STACK is not None
        signal.pthread_kill(self.thread.ident, signals.STACK)

    def _answer(self, file: int) -> list[Line]:
        """What the thread has written, once it has come to its first frame or to the limit of 100 frames."""
        text = _text(file)
        lines = _parsed(text)
        whole = bool(lines) and self._first is not None and lines[-1][::2] == self._first[::2]
        return lines if whole or text.endswith("  ...\n") else []


def where(lines: Sequence[Line]) -> tuple[str, str | None]:
    """The innermost line of the user's code, as text, and the collective in which the thread waits."""
    waits = "backward" if lines and lines[0].function == "_engine_run_backward" else None
    left = list(lines)
    while left and left[0].is_in(*_COLLECTIVES):
        if not left[0].path.endswith("c10d_logger.py"):  # a decorator of all collectives
            waits = left[0].function
        del left[0]
    line = next((line for line in left if not _is_of_library(line)), lines[0] if lines else None)
    text = f", in {line.function} ({os.path.basename(line.path)}:{line.number})" if line is not None else ""
    return f"{text}, in the collective {waits}" if waits else text, waits


def _is_of_library(line: Line) -> bool:
    of_python = line.is_in(_PYTHON, "<frozen ") and "site-packages" not in line.path
    return of_python or line.is_in(*_LIBRARIES)


def _file() -> int | None:
    """Where this process writes its stacks; one that it was forked from has another file."""
    if signals.STACK is None or not hasattr(os, "memfd_create"):
        return None
    if _files.get(os.getpid()) is None:
        if not _files and signal.getsignal(signals.STACK) != signal.SIG_DFL:
            return None  # somebody else uses it
        _files.clear()
        _files[os.getpid()] = os.memfd_create("stack")
        faulthandler.register(signals.STACK, _files[os.getpid()], all_threads=False)
    return _files[os.getpid()]


def _text(file: int) -> str:
    return os.pread(file, 1 << 17, 0).decode(errors="replace")


def _parsed(text: str) -> list[Line]:
    return [Line(*found) for found in re.findall(r'^  File "(.*)", line (\S+) in (.*)\n', text, re.MULTILINE)]
