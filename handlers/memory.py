"""Memory of the device and of the host, the largest over the ranks."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events

from ignite_engine import devices
from ignite_engine.errors import is_number, shapes_of
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.handlers.host_memory import MIB, Limit, Limits, memory_groups, peak_mib, rss_mib
from ignite_engine.ranks import agreement
from ignite_engine.ranks.agreement import gather_floats

logger = logging.getLogger(__name__)

PHASES = {
    "after_forward_mib": TrainingEvents.FORWARD_COMPLETED,
    "after_backward_mib": TrainingEvents.BACKWARD_COMPLETED,
    "after_optimizer_mib": TrainingEvents.OPTIMIZER_STEP_COMPLETED,
}
_SMALLEST = ("host_limit_mib", "host_headroom_mib")


class MemoryLogger:
    """Writes how much memory is in use, at its event.

    With the model on a device that counts its memory: ``memory/allocated_mib`` and ``memory/reserved_mib`` now,
    ``memory/peak_mib`` (allocated, the maximum since this handler last wrote: it resets torch's peak statistics),
    ``memory/retries`` and ``memory/ooms`` (allocations that succeeded after freeing the cache, or failed; totals of the
    process). Everywhere: ``memory/host_rss_mib`` now and ``memory/host_peak_mib``, of the whole process so far (the
    kernel keeps no peak per interval). Loader workers are separate processes and are not included.

    By phase, in the first iteration since it last wrote: ``memory/after_forward_mib``, ``memory/after_backward_mib``
    (the largest over its micro-batches) and ``memory/after_optimizer_mib``, allocated on the device; else
    ``memory/host_after_forward_mib`` and so on, of the host. They need an Update; in the other iterations nothing is
    done.

    ``memory/host_limit_mib`` and ``memory/host_headroom_mib``: the limit of the control group (a container's) or of the
    machine that leaves the least, and what it leaves; loader workers and other processes count.

    On several ranks each value is the largest over them (of the last two the smallest), by one collective at the event,
    and ``memory/peak_rank`` is the rank whose ``peak_mib`` (on the CPU ``host_rss_mib``) is the largest.

    If the run ends because a device is out of memory, the shapes of the batch are in a note of the error, and with
    ``directory`` they and torch's summary of the device's memory are in ``out_of_memory_rank_0.txt`` there.

    All values are in MiB, except the two counts. No state is saved.

    Args:
        directory: of the run; None: no such file.
        warn_below: share of the limit; headroom below it is one warning in a run.

    Raises:
        ValueError: ``warn_below`` is not from 0 to 1.
    """

    phase = Phase.MEASURE
    replayed = False

    def __init__(self, directory: str | Path | None = None, *, warn_below: float = 0.05) -> None:
        if not is_number(warn_below) or not 0 <= warn_below <= 1:
            raise ValueError(f"warn_below must be a share of the limit from 0 to 1, got {warn_below!r}.")
        self.directory = None if directory is None else Path(directory).absolute()
        self.warn_below = warn_below
        self._by_phase: dict[str, float] = {}
        self._entries: dict[Any, tuple[int, Any]] = {}
        """The entries of the phases in the trainer's list of handlers, and where in the list each was."""
        self._listens = False
        self._sampled = 0
        self._limits: Limits | None = None
        self._warned = self._watches = False

    def attach(self, trainer: Engine, event: Any = Events.ITERATION_COMPLETED(every=50)) -> None:  # noqa: B008  # immutable
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Engine) -> None:
        values = {"host_rss_mib": rss_mib()}
        values["host_peak_mib"] = max(values["host_rss_mib"], peak_mib())
        limit = self._limit()
        values |= {"host_limit_mib": limit.limit_mib, "host_headroom_mib": limit.headroom_mib}
        device = _device(trainer)
        on_device = devices.has_memory_statistics(device.type)
        prefix = "" if on_device else "host_"
        values |= {f"{prefix}{name}": self._by_phase.get(name, math.nan) for name in PHASES}
        if on_device:
            values |= _device_values(device)
        rows = gather_floats(list(values.values()))
        metrics, columns = trainer.state.metrics, dict(zip(values, zip(*rows), strict=True))
        for name, column in columns.items():
            known = [value for value in column if value == value]
            if known:
                metrics[f"memory/{name}"] = (min if name in _SMALLEST else max)(known)
        if len(rows) > 1:
            ranked = columns["peak_mib" if "peak_mib" in values else "host_rss_mib"]
            metrics["memory/peak_rank"] = float(ranked.index(max(ranked)))
        headroom = columns["host_headroom_mib"]
        rank = headroom.index(min(headroom))
        if not self._warned and headroom[rank] < self.warn_below * columns["host_limit_mib"][rank]:
            self._warned = True
            if agreement.rank() == rank:
                logger.warning(
                    "%.0f MiB of host memory are left of the %.0f MiB of %s%s: the process is killed where none is. "
                    "Use fewer loader workers or a smaller prefetch_factor, or give it more memory.",
                    limit.headroom_mib,
                    limit.limit_mib,
                    limit.of,
                    agreement.on_ranks([rank]),
                )
        self._listen(trainer)

    def _start(self, trainer: Any) -> None:
        self._warned = False
        self._listen(trainer)

    def _end(self, trainer: Any) -> None:
        self._watches = False
        self._ignore(trainer)
        error = sys.exception()
        if isinstance(error, torch.OutOfMemoryError):
            self._explain(trainer, error)

    def _limit(self) -> Limit:
        if self._limits is None:
            self._limits = Limits(memory_groups())
        return self._limits.tightest()

    def _listen(self, trainer: Any) -> None:
        """Ask for what is in use in the phases of the next iteration, and whether the run ends out of memory."""
        if not self._watches:  # at the start, and where a paused run goes on
            trainer.call_at_end(self._end)
            self._watches = True
        self._by_phase.clear()
        self._sampled = trainer.state.iteration + 1
        if self._listens:
            return
        self._listens, lists = True, trainer._event_handlers
        if not self._entries:
            for event, handler in zip(
                PHASES.values(), (self._after_forward, self._after_backward, self._after_optimizer), strict=True
            ):
                trainer.add_event_handler(event, handler)
                index = next(at for at, entry in enumerate(lists[event]) if entry[0] == handler)
                self._entries[event] = index, lists[event][index]
            return
        # at each log point: to attach and remove them anew costs 40 times as much
        for event, (index, entry) in self._entries.items():
            lists[event] = [*lists[event][:index], entry, *lists[event][index:]]

    def _after_forward(self, trainer: Engine) -> None:
        self._note("after_forward_mib", trainer)

    def _after_backward(self, trainer: Engine) -> None:
        self._note("after_backward_mib", trainer)

    def _after_optimizer(self, trainer: Engine) -> None:
        self._note("after_optimizer_mib", trainer)

    def _note(self, name: str, trainer: Engine) -> None:
        if trainer.state.iteration > self._sampled:
            self._ignore(trainer)
            return
        device = _device(trainer)
        on_device = devices.has_memory_statistics(device.type)
        in_use = devices.allocated_bytes(device) / MIB if on_device else rss_mib()
        self._by_phase[name] = max(in_use, self._by_phase.get(name, 0.0))

    def _ignore(self, trainer: Engine) -> None:
        if not self._listens:
            return
        self._listens, lists = False, trainer._event_handlers
        for event, (index, entry) in self._entries.items():
            if entry in lists[event]:  # else somebody has removed it
                index = lists[event].index(entry)
            self._entries[event] = index, entry
            # a new list: the event may be firing now, over the old one
            lists[event] = [*lists[event][:index], *lists[event][index + 1 :]]

    def _explain(self, trainer: Any, error: torch.OutOfMemoryError) -> None:
        device, iteration = _device(trainer), trainer.state.iteration
        groups = trainer.state.batch
        shapes = "; ".join(map(shapes_of, groups)) if isinstance(groups, list) else shapes_of(groups)
        if self.directory is None:
            error.add_note(f"The batch of iteration {iteration} has the shapes {shapes}.")
            return
        path = self.directory / f"out_of_memory_rank_{agreement.rank()}.txt"
        lines = [
            f"{type(error).__name__}: {error}",
            f"iteration {iteration}, epoch {trainer.state.epoch}, rank {agreement.rank()}, {device}",
            f"shapes of the micro-batches: {shapes}",
            f"by phase, in the first iteration since it was last logged: {self._by_phase}",
            f"host: {rss_mib():.0f} MiB, {self._limit()}",
        ]
        if devices.has_memory_statistics(device.type):
            lines.append(devices.memory_summary(device))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as failure:
            error.add_note(f"The batch of iteration {iteration} has the shapes {shapes}; {path}: {failure}.")
        else:
            error.add_note(f"The batch of iteration {iteration} has the shapes {shapes}; memory is in {path}.")


def _device(trainer: Engine) -> torch.device:
    """Where the trainer's model lives; for a user's own update the current device, if one is in use."""
    device = getattr(getattr(trainer, "update", None), "device", None)
    if isinstance(device, torch.device):
        return device
    return devices.in_use()


def _device_values(device: torch.device) -> dict[str, float]:
    statistics = devices.memory_statistics(device)
    devices.reset_peak_memory(device)
    return {
        "allocated_mib": statistics.get("allocated_bytes.all.current", 0) / MIB,
        "reserved_mib": statistics.get("reserved_bytes.all.current", 0) / MIB,
        "peak_mib": statistics.get("allocated_bytes.all.peak", 0) / MIB,
        "retries": float(statistics.get("num_alloc_retries", 0)),
        "ooms": float(statistics.get("num_ooms", 0)),
    }
