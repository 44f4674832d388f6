"""Checks whether ranks can be forked from this process, and prepares it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ignite_engine import devices
from ignite_engine.errors import LaunchError

_HARD = 2  # omp_pause_hard, of OpenMP 5.0


@contextmanager
def ready_to_fork() -> Iterator[None]:
    """Within the body this process may fork ranks that compute.

    Raises:
        LaunchError: one line; it cannot, and why.
    """
    if not hasattr(os, "fork"):
        raise LaunchError("restarts needs a system that can fork processes; leave it out here.")
    if (device := devices.in_use()).type != "cpu":
        raise LaunchError(
            f"restarts forks the ranks, and this process has used {device} already, which a forked process cannot "
            "use: make tensors on the device within the function that each rank calls, not before."
        )
    _end_threads_of_openmp()
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page that holds an object
    try:
        yield
    finally:
        gc.unfreeze()


def _end_threads_of_openmp() -> None:
    """End the threads of GNU's OpenMP: a forked child would wait for them for ever.

    OpenMP starts them again for the next computation.
    """
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:  # not Linux, where torch has LLVM's OpenMP, which knows of forks
        return
    for path in sorted({line.split()[-1] for line in mapped.splitlines() if "libgomp" in line}):
        if ctypes.CDLL(path).omp_pause_resource_all(_HARD):
            raise LaunchError(
                "restarts forks the ranks, and threads of this process compute: call it when they have ended, or from "
                "a program that has not computed yet."
            )
