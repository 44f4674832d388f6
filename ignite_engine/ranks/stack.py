"""Where a thread is: its stack, which it writes itself, in a signal handler of :mod:`faulthandler`.

No other thread reads it: frames and thread states of one that runs, or of C++ that enters Python just then, cannot be
read from outside without a crash now and then. In CPython 3.11 both ``sys._current_frames`` and
``faulthandler.dump_traceback`` have ended ranks so. Where there are no real-time signals (macOS) nothing is known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ignite
import numpy
import torch

from ignite_engine.ranks import signals

_MAY_TAKE_S = 0.1
_LONGEST_NAME = 500
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_COLLECTIVES = (_TORCH + os.path.join("distributed", ""), _TORCH + os.path.join("nn", "parallel", ""))
_PYTHON = os.path.join(os.path.dirname(os.__file__), "")
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
    """The stack of the thread that makes it, for others to ask for until it is closed."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        self.first = tuple(map(_as_written, (frame.f_code.co_filename, frame.f_code.co_name)))
        # a thread that Python has not started does not tell when it has ended
        self._file = None if isinstance(self.thread, threading._DummyThread) else _file_of_this_process()
        if self._file is not None:
            self._file.stacks.add(self)

    def close(self) -> None:
        if self._file is not None:
            self._file.close(self)
            self._file = None

    def lines(self) -> list[Line]:
        """The innermost line first; empty where the thread does not answer within 0.1 s."""
        return [] if self._file is None else self._file.lines(self)

    def text(self, lines: Sequence[Line]) -> str:
        """As Python prints them, the innermost line last; reads their source files."""
        texts = []
        for line in reversed(lines):
            source = linecache.getline(line.path, int(line.number)).strip() if line.number.isdigit() else ""
            texts.append(f'  File "{line.path}", line {line.number}, in {line.function}\n')
            texts += [f"    {source}\n"] if source else []
        return f"Thread {self.thread.name}:\n{''.join(texts)}" if texts else ""


class _File:
    """Where the threads of a process write their stacks, one after the other."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.stacks: weakref.WeakSet[Stack] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._asked: Stack | None = None
        self._descriptor = os.memfd_create("stack")
        self._made = os.fstat(self._descriptor)
        assert signals.STACK is not None
        faulthandler.register(signals.STACK, self._descriptor, all_threads=False)

    def lines(self, stack: Stack) -> list[Line]:
        if self.pid != os.getpid():
            return []
        with self._lock, contextlib.suppress(OSError):  # the user's code closes the descriptor just now
            deadline = time.monotonic() + _MAY_TAKE_S
            while stack.thread.is_alive() and self._is_open() and time.monotonic() < deadline:
                if (asked := self._waits_for) is None:
                    self._ask(stack)
                elif found := self._answer(asked):
                    self._asked = None  # not before: what it writes later would be mixed with the next
                    if asked is stack:
                        return found
                else:
                    time.sleep(0.0005)
        return []

    def close(self, stack: Stack) -> None:
        """The last one leaves nothing, unless a signal is on its way: without a handler it would end the process."""
        global _file
        if self.pid != os.getpid():
            return
        with self._lock:
            self.stacks.discard(stack)
            if not self.stacks and self._waits_for is None:
                assert signals.STACK is not None
                faulthandler.unregister(signals.STACK)
                if self._is_open():
                    os.close(self._descriptor)
                _file = None

    @property
    def _waits_for(self) -> Stack | None:
        """Whose thread was asked, and has not answered yet."""
        return self._asked if self._asked is not None and self._asked.thread.is_alive() else None

    def _is_open(self) -> bool:
        """Whether it is this file still: the user's code may have closed it, and opened one of its own."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._made)
        except OSError:
            return False

    def _ask(self, stack: Stack) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.ftruncate(self._descriptor, 0)
        assert stack.thread.ident is not None and signals.STACK is not None
        if stack.thread.is_alive():
            self._asked = stack
            # with Python's lock held: the thread, which has not, is in no midst of making a frame
            signal.pthread_kill(stack.thread.ident, signals.STACK)

    def _answer(self, stack: Stack) -> list[Line]:
        """What the thread has written, once it has come to its first frame or to the limit of 100 frames."""
        text = os.pread(self._descriptor, 1 << 17, 0).decode(errors="replace")
        lines = _parsed(text)
        whole = bool(lines) and (lines[-1].path, lines[-1].function) == stack.first
        return lines if whole or text.endswith("  ...\n") else []


_file: _File | None = None


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


def _file_of_this_process() -> _File | None:
    """None: it can have none. A process that it was forked from has another."""
    global _file
    if signals.STACK is None or not hasattr(os, "memfd_create"):
        return None
    try:
        if _file is None and _is_taken(signals.STACK):
            return None
        if _file is None or _file.pid != os.getpid():
            _file = _File()
    except OSError:  # the system does not allow it, or has no descriptors left
        return None
    return _file


def _is_taken(number: int) -> bool:
    """Whether a signal is handled or ignored, by libraries too, which Python does not know."""
    masks = re.findall(r"^Sig(?:Ign|Cgt):\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def _as_written(name: str) -> str:
    """As :mod:`faulthandler` writes it."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."


def _parsed(text: str) -> list[Line]:
    found = re.findall(r'^  File "(.*)", line (\S+) in (.*)\n', text, re.MULTILINE)
    return [Line(_decoded(path), number, _decoded(function)) for path, number, function in found]


def _decoded(name: str) -> str:
    """What is not ASCII is written as in a Python string."""
    escape = r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})"
    return re.sub(escape, lambda found: chr(int(found[found.lastindex or 0], 16)), name)
