"""Record, fail or kill a process at every file operation under one directory, with real files underneath.

- ``everywhere(work, folder, fault, check)``: the fault at each file operation of ``work`` in turn.
- ``DAMAGES``: what may happen to a file, by name.
- ``FileOperations``: the same by hand; usable wherever ``os`` is what the code under test calls.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.kit.processes import child

OPERATIONS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")
_TOKEN = re.compile(r"-[0-9a-f]{8}\b")


class FileOperations:
    """The operations seen under ``root``, as (operation, path relative to it without random tokens).

    Args:
        root: what lies elsewhere is neither recorded nor failed.
        at: number of the operation, from 0, at which ``action`` is called, before the operation is done; or the
            operation and a pattern that is found in its path, for the first such one.
        action: may raise, or end the process; on a write it comes after the first half of the bytes was written.
    """

    def __init__(self, root, at=None, action=None):
        self.root = root
        self.seen = []
        self.acted = 0
        self._at = at
        self._action = action
        self._descriptors = {}
        self._real = {}

    def __enter__(self):
        for name in OPERATIONS:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._watched(name))
        return self

    def __exit__(self, *error):
        for name, function in self._real.items():
            setattr(os, name, function)

    def _watched(self, name):
        real = self._real[name]

        def operation(target, *args, **kwargs):
            path = self._descriptors.get(target) if isinstance(target, int) else Path(target)
            if path is None or not path.is_relative_to(self.root):
                result = real(target, *args, **kwargs)
                if name == "open":
                    self._descriptors.pop(result, None)  # it had been a file under root
                return result
            number = len(self.seen)
            relative = [path.relative_to(self.root)]
            if name == "rename":
                relative.append(Path(args[0]).relative_to(self.root))
            self.seen.append((name, " -> ".join(_TOKEN.sub("", str(each)) for each in relative)))
            if self._action is not None and self._is_meant(number):
                self.acted += 1
                written = real(target, memoryview(args[0])[: len(args[0]) // 2]) if name == "write" else 0
                self._action()
                if name == "write":
                    return written + real(target, memoryview(args[0])[written:])
            result = real(target, *args, **kwargs)
            if name == "open":
                self._descriptors[result] = path
            return result

        return operation

    def _is_meant(self, number):
        if isinstance(self._at, tuple):
            operation, path = self.seen[number]
            return self.acted == 0 and operation == self._at[0] and re.search(self._at[1], path)
        return number == self._at


def kill_this_process():
    """SIGKILL, as no handler and no ``finally`` survives it."""
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt():
    """As Ctrl-C does, which no other thread sees."""
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


@dataclass
class Point:
    """Where a fault was.

    Attributes:
        done: the operations before it, as ``FileOperations.seen``.
        result: what ``work`` returned or raised; None where it was killed.
    """

    done: list
    result: object = None

    @property
    def returned(self):
        """Whether ``work`` returned all the same."""
        return self.result is not None and not isinstance(self.result, BaseException)

    def has_done(self, operation, path):
        """Whether an operation came before the fault, on a path in which this pattern is found."""
        return any(kind == operation and re.search(path, where) for kind, where in self.done)


def everywhere(work, folder, fault, check):
    """Do ``work`` on a copy of ``folder`` to see its file operations; then, on a fresh copy each, with a fault at each.

    Args:
        work: called with the copy; the order of its operations may differ from time to time, not their number.
        folder: what there is before it.
        fault: ``kill_this_process``, which a process of its own meets, or what raises an error, as ``full_disk``.
        check: called after each fault with the copy and its ``Point``.

    Returns:
        The points.
    """
    copies = folder.parent / f"copies_of_{folder.name}"
    with _unsynchronised():
        if fault is kill_this_process:
            points = child(_killed_everywhere, work, folder, copies)
            for number, point in enumerate(points):
                check(copies / str(number), point)
        else:
            points = []
            for number in range(len(_rehearsed(work, folder, copies))):
                points.append(_with_a_fault(work, _copy(folder, copies / str(number)), number, fault))
                check(copies / str(number), points[number])
    shutil.rmtree(copies)
    return points


@contextlib.contextmanager
def _unsynchronised():
    """No power fails here: synchronising would only take most of the time."""
    real, os.fsync = os.fsync, lambda descriptor: None
    try:
        yield
    finally:
        os.fsync = real


def _copy(folder, copy):
    shutil.copytree(folder, copy, symlinks=True)
    return copy


def _rehearsed(work, folder, copies):
    with FileOperations(_copy(folder, copies / "rehearsal")) as operations:
        work(copies / "rehearsal")
    return operations.seen


def _with_a_fault(work, folder, number, fault):
    with FileOperations(folder, at=number, action=fault) as operations:
        try:
            result = work(folder)
        except BaseException as error:
            result = error.with_traceback(None)  # which would keep what the work has made
    assert operations.acted == 1
    return Point(operations.seen[:number], result)


def _killed_everywhere(work, folder, copies):
    """In a process that has done the work once, so that each of those it forks has little to do."""
    with _unsynchronised():
        seen = _rehearsed(work, folder, copies)
    for number in range(len(seen)):
        copy = _copy(folder, copies / str(number))
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException), _unsynchronised():
                _with_a_fault(work, copy, number, kill_this_process)
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == -signal.SIGKILL, (code, seen[number])
    return [Point(seen[:number]) for number in range(len(seen))]


def truncated(file):
    os.truncate(file, file.stat().st_size // 2)


def changed(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def longer(file):
    with file.open("ab") as end:
        end.write(b"x")


def linked(file):
    """As if somebody had moved it to a larger disk."""
    elsewhere = file.parent.with_name(f"{file.name}_elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def pipe(file):
    """Who opens it waits for its other end."""
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "truncated": truncated,
    "one bit changed": changed,
    "one byte longer": longer,
    "missing": Path.unlink,
    "empty": lambda file: os.truncate(file, 0),
    "a link": linked,
    "a pipe": pipe,
}


_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_PRIVATE, _MS_REC, _CLONE_NEWNS = 1, 32, 4096, 1 << 18, 1 << 14, 0x00020000


def _checked(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount_small_file_system(path, size_kib):
    """A tmpfs that only this process sees, so that nothing is left when it ends. For a child; needs the right to."""
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.unshare(_CLONE_NEWNS))
    _checked(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _checked(libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, f"size={size_kib}k".encode()))


def make_read_only(path):
    """Make a mounted directory read-only; holds for root too.

    By a mount on top of it: the file system itself stays writable while a file in it, as a run's lock, is open.
    """
    libc, target = ctypes.CDLL(None, use_errno=True), os.fsencode(path)
    _checked(libc.mount(target, target, None, _MS_BIND, None))
    _checked(libc.mount(b"none", target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None))


def make_writable(path):
    """Undo ``make_read_only``."""
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.umount(os.fsencode(path)))


def can_mount():
    """Whether a process may mount a file system here; asked while tests are collected, so without the fork server."""
    if (pid := os.fork()) == 0:
        code = 1
        with contextlib.suppress(OSError):
            mount_small_file_system(Path("/mnt"), 64)
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


@contextlib.contextmanager
def environment(**values):
    """Environment variables for the time of a test."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
