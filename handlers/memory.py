"""Memory of the device and of the host, the largest over the ranks."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from ignite.engine import Engine, Events

from ignite_engine.events import Phase
from ignite_engine.ranks.agreement import gather_floats

MIB = 2**20
_STATUS = Path("/proc/self/status")


class MemoryLogger:
    """Writes how much memory is in use, at its event; it does nothing between its events.

    With the model on CUDA: ``memory/allocated_mib`` and ``memory/reserved_mib`` now, ``memory/peak_mib`` (allocated,
    the maximum since this handler last wrote: it resets torch's peak statistics), ``memory/retries`` and
    ``memory/ooms`` (allocations that succeeded after freeing the cache, or failed; totals of the process).
    Everywhere: ``memory/host_rss_mib`` now and ``memory/host_peak_mib``, of the whole process so far (the kernel keeps
    no peak per interval). Loader workers are separate processes and are not included.

    On several ranks each value is the largest over them, by one collective at the event, and ``memory/peak_rank`` is
    the rank whose ``peak_mib`` (without CUDA ``host_rss_mib``) is the largest.

    All values are in MiB, except the two counts. No state is saved.
    """

    phase = Phase.MEASURE

    def attach(self, trainer: Engine, event: Any = Events.ITERATION_COMPLETED(every=50)) -> None:  # noqa: B008  # immutable
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Engine) -> None:
        values = _host_values()
        device = _device(trainer)
        if device.type == "cuda":
            values |= _cuda_values(device)
        rows = gather_floats(list(values.values()))
        for name, column in zip(values, zip(*rows)):
            trainer.state.metrics[f"memory/{name}"] = max(column)
        if len(rows) > 1:
            ranked = list(values).index("peak_mib" if "peak_mib" in values else "host_rss_mib")
            trainer.state.metrics["memory/peak_rank"] = float(
                max(range(len(rows)), key=lambda rank: rows[rank][ranked])
            )


def _device(trainer: Engine) -> torch.device:
    """Where the trainer's model lives; for a user's own update the current CUDA device, if CUDA is in use."""
    device = getattr(getattr(trainer, "update", None), "device", None)
    if isinstance(device, torch.device):
        return device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _cuda_values(device: torch.device) -> dict[str, float]:
    statistics = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "allocated_mib": statistics.get("allocated_bytes.all.current", 0) / MIB,
        "reserved_mib": statistics.get("reserved_bytes.all.current", 0) / MIB,
        "peak_mib": statistics.get("allocated_bytes.all.peak", 0) / MIB,
        "retries": float(statistics.get("num_alloc_retries", 0)),
        "ooms": float(statistics.get("num_ooms", 0)),
    }


def _host_values() -> dict[str, float]:
    rss = psutil.Process().memory_info().rss / MIB
    return {"host_rss_mib": rss, "host_peak_mib": max(rss, _host_peak_mib())}


def _host_peak_mib() -> float:
    if _STATUS.exists():
        # not ru_maxrss: a child started by a larger process inherits its parent's
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024
