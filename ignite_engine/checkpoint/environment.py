"""The environment of a process as plain values, and the parts of it that determine the bits of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ignite_engine import devices

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "WORLD_SIZE")
# another value of one of these changes the order in which kernels or reductions add
_DECIDING = {
    "world_size": "ranks",
    "torch": "torch",
    "cpu_capability": "vector instructions",
    "threads": "threads",
    "runtime": "torch's runtime",
    "devices": "devices",
    "sharding": "sharding",
}


def environment_values(world_size: int) -> dict[str, Any]:
    """Command, machine, devices and torch of this process; not the versions of other packages."""
    machine = os.uname()  # the functions of `platform` start a process, which a save in a thread must not
    return {
        "command": sys.argv,
        "working_directory": str(Path.cwd()),
        "python": sys.version,
        "torch": str(torch.__version__),
        "platform": f"{machine.sysname}-{machine.release}-{machine.machine}",
        "processor": machine.machine,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": devices.names(),
        "runtime": devices.runtime(),
        "world_size": world_size,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def inexact_reasons(saved: Mapping[str, Any], now: Mapping[str, Any], *, any_ranks: bool = False) -> list[str]:
    """Reasons why a run may continue with other bits than in the environment it was saved in.

    Args:
        any_ranks: the bits of the run do not depend on the number of ranks.

    Returns:
        Such as ``ranks: 2 when it was saved, 1 now``.
    """
    return [
        f"{name}: {_text(saved[key])} when it was saved, {_text(now.get(key))} now"
        for key, name in _DECIDING.items()
        if key in saved and saved[key] != now.get(key) and not (any_ranks and key == "world_size")
    ]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
