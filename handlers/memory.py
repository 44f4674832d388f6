"""Memory of the device and of the host, the largest over the ranks."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from ignite.engine import Engine, Events

from ignite_engine import devices
from ignite_engine.events import Phase
from ignite_engine.ranks import agreement

MIB = 2**20


class MemoryLogger:
    """Write how much memory is in use, in MiB.

    With the model on a device that counts its memory: ``memory/allocated_mib`` and ``memory/reserved_mib`` now,
    ``memory/peak_mib`` (allocated, the maximum since this handler last wrote: it resets torch's peak statistics), and
    once there were any ``memory/retries`` and ``memory/ooms`` (allocations that succeeded after freeing the cache, or
    failed; totals of the process). Everywhere: ``memory/host_rss_mib``, without loader workers.

    On several ranks each value is the largest over them, by one collective at the event, and ``memory/peak_rank`` is
    the rank whose ``peak_mib`` (on the CPU ``host_rss_mib``) is the largest.

    No state is saved.
    """

    phase = Phase.MEASURE

    def attach(self, trainer: Engine, event: Any = Events.ITERATION_COMPLETED(every=50)) -> None:  # noqa: B008  # immutable
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Engine) -> None:
        """Write into ``state.metrics``; a collective."""
        device = _device(trainer)
        values = {"host_rss_mib": psutil.Process().memory_info().rss / MIB}
        if devices.is_accelerator(device.type):
            values |= _device_values(device)
        rows = agreement.gather_floats(list(values.values()))
        columns = dict(zip(values, zip(*rows, strict=True), strict=True))
        metrics = trainer.state.metrics
        for name, column in columns.items():
            if max(column) or name.endswith("_mib"):
                metrics[f"memory/{name}"] = max(column)
        if len(rows) > 1:
            ranked = columns["peak_mib" if "peak_mib" in values else "host_rss_mib"]
            metrics["memory/peak_rank"] = float(ranked.index(max(ranked)))


def _device(trainer: Engine) -> torch.device:
    """Where the trainer's model lives; for a user's own update the current device, if one is in use."""
    device = getattr(getattr(trainer, "update", None), "device", None)
    return device if isinstance(device, torch.device) else devices.in_use()


def _device_values(device: torch.device) -> dict[str, float]:
    statistics = devices.take_memory_statistics(device)
    return {
        "allocated_mib": statistics.get("allocated_bytes.all.current", 0) / MIB,
        "reserved_mib": statistics.get("reserved_bytes.all.current", 0) / MIB,
        "peak_mib": statistics.get("allocated_bytes.all.peak", 0) / MIB,
        "retries": float(statistics.get("num_alloc_retries", 0)),
        "ooms": float(statistics.get("num_ooms", 0)),
    }
