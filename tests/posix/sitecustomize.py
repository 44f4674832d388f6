"""In each process whose path has this folder: what Linux has and other POSIX systems have not is taken away."""

import builtins
import io
import os
import signal
import sys

for module, names in (
    (signal, ("SIGRTMIN", "SIGRTMAX", "sigtimedwait", "sigwaitinfo", "SIGSTKFLT", "SIGPWR", "SIGPOLL")),
    (os, ("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "copy_file_range", "posix_fadvise")),
    (os, ("posix_fallocate", "fdatasync", "eventfd", "setns", "unshare", "getrandom", "O_TMPFILE", "O_DIRECT")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

_of_linux = ("/proc", "/sys", "/dev/shm")


def _without(function):
    def call(path, *arguments, **options):
        own = str(sys._getframe(1).f_globals.get("__name__", "")).split(".")[0] == "psutil"  # it knows other systems
        if not own and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_of_linux):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *arguments, **options)

    return call


builtins.open = io.open = _without(builtins.open)
for _name in ("open", "stat", "listdir", "scandir", "readlink"):
    setattr(os, _name, _without(getattr(os, _name)))
