"""The conditions of a measurement."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path


def machine() -> dict[str, str]:
    """Processor, versions, commit."""
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    root = Path(__file__).parent
    git = [
        "git",
        "--no-optional-locks",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)",
        "python": platform.python_version(),
        "torch": version("torch"),
        "pytorch-ignite": version("pytorch-ignite"),
        "commit": commit or "unknown",
    }


def installed(package: str) -> bool:
    """Whether an optional contender can take part."""
    return importlib.util.find_spec(package) is not None


def busy_cores(seconds: float = 1.0) -> float:
    """How many cores other programs use now; where the system does not say, the load average of the last minute."""
    before, elapsed = _idle_s(), time.perf_counter()
    if before is None:
        return os.getloadavg()[0]
    time.sleep(seconds)
    after, elapsed = _idle_s(), time.perf_counter() - elapsed
    assert after is not None
    return max(0.0, (os.cpu_count() or 1) - (after - before) / elapsed)


def _idle_s() -> float | None:
    """Seconds that all cores together were idle or waited for a disk."""
    first = next((line.split() for line in _lines("/proc/stat") if line.startswith("cpu ")), None)
    return None if first is None else (int(first[4]) + int(first[5])) / os.sysconf("SC_CLK_TCK")


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
