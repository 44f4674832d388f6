"""Where the time of a run goes: the parts of a step, the slowest rank, the ledger of all starts, and a verdict."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, time
from typing import Any

import torch
from ignite.engine import Events
from ignite.engine.events import RemovableEventHandle
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset, default_collate

from ignite_engine import Phase, Trainer, TrainingEvents, Update, Updates, devices
from ignite_engine.data import SeededDataset
from ignite_engine.handlers.compilations import call_around_compilations
from ignite_engine.handlers.host_memory import Limits, memory_groups
from ignite_engine.handlers.step_times.clocks import BETWEEN, STEP, DeviceClock, HostClock, StepClock, own_time
from ignite_engine.handlers.step_times.memory_growth import MemoryGrowth
from ignite_engine.ranks import agreement
from ignite_engine.ranks.ddp_buffers import shared_buffers
from ignite_engine.report.goodput import Figures, Ledger, LedgerFile, Verdict, no_cause, read_ledger, verdict
from ignite_engine.run_directory import RunDirectory
from ignite_engine.state import Start
from ignite_engine.text import in_notebook

logger = logging.getLogger(__name__)
LOST = 1e-3
"""The share of a start's time after which the ledger's newest line is written again, between 0.02 and 1 s: a kill loses
no more than that, or the work between two events."""
_ALWAYS = (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, TrainingEvents.BACKWARD_COMPLETED)
"""Events at which each StepTimes has a handler itself, out of those that are searched for other handlers."""


class StepTimes:
    """Times of the parts of an iteration, of its 50th and 99th percentile, and of the slowest rank.

    Args:
        directory: of the run, which gets a ``goodput.jsonl``: where the time of all its starts went (see
            ``ignite_engine.report.goodput``). None: no file.
        since: when this start of the run began, by ``time.perf_counter()``; None: when this was attached. What lies
            between it and the first epoch is the start-up.

    Written at the event, in ms per iteration since it last wrote, means over the ranks; together they are all of the
    time:

    - ``time/data_wait_ms``, ``time/copy_ms`` (from there to the forward: the copy to the device, weights of
      micro-batches), ``time/forward_ms``, ``time/backward_ms``, ``time/reduction_ms`` (what DDP's reduction takes
      beyond the backward, waiting for slower ranks included; of FSDP2 it is part of forward and backward),
      ``time/optimizer_ms`` (unscale, clip, step). A custom update function is ``time/update_ms`` as a whole;
    - ``time/evaluation_ms``, ``time/checkpoint_ms``, ``time/logging_ms`` (the sinks), and ``time/handlers_ms``: all
      other handlers, and what the engine itself takes;
    - ``time/step_ms``: the sum of the first group; ``time/step_p50_ms`` and ``time/step_p99_ms`` of it, of all steps of
      this process, to 1 %, the largest over the ranks;
    - on several ranks ``time/slowest_rank``, ``time/slowest_rank_ms``: the step of the slowest without its reduction,
      and ``time/other_ranks_ms``, the median of that of the others.

    With its first values a start writes ``time/startup_s``, the seconds until its first epoch and in ``torch.compile``
    since, the most of all ranks.

    A part that takes no time in a run is not written. On an accelerator the times are the device's, by events in its
    stream that are read once they have completed: nothing waits for it. One collective at the event, none between. When
    the run ends, rank 0 logs why it was not faster, or that nothing slowed it (``docs/performance.md``). No state is
    saved.
    """

    def __init__(self, directory: str | Path | None = None, *, since: float | None = None) -> None:
        self.directory = None if directory is None else RunDirectory(directory)
        self.verdict: Verdict | None = None
        """Why the run was not faster, when it has ended; rank 0's."""
        self._began = since
        self._clock: StepClock = HostClock()
        self._file: LedgerFile | None = None
        self._around: list[RemovableEventHandle] = []
        self._reset()

    def _reset(self) -> None:
        self._rest, self._waiting, self._reduced = "startup", False, False
        self._paused = self._saved = False
        self._before_step = 0
        self._written = dict.fromkeys((*STEP, *BETWEEN), 0.0)
        self._steps_written = self._caught_up = self._completed = 0
        self._ranks: list[dict[str, float]] = []
        self._saves_in_background = self._startup_written = False
        self._next_beat = self._opening_s = 0.0
        self._opened: float | None = None
        self._growth = MemoryGrowth()

    def attach(self, trainer: Trainer, event: Any = Events.ITERATION_COMPLETED(every=50)) -> None:  # noqa: B008  # immutable
        """Write at ``event``."""
        if self._began is None and not in_notebook():  # where the time until the next cell is unknown
            self._began = perf_counter()
        on, own = trainer.add_event_handler, TrainingEvents
        on(Events.STARTED, self._start)
        on(Events.EPOCH_STARTED, self._epoch_starts)
        on(Events.GET_BATCH_STARTED, self._wait_starts)
        on(Events.GET_BATCH_COMPLETED, self._wait_ends)
        on(own.FORWARD_STARTED, self._forward_starts)
        on(own.FORWARD_COMPLETED, self._forward_ends)
        on(own.BACKWARD_COMPLETED, self._backward_ends)
        on(own.OPTIMIZER_STEP_COMPLETED, self._optimizer_ends)
        on(own.OPTIMIZER_STEP_SKIPPED, self._optimizer_ends)
        on(Events.ITERATION_COMPLETED, self._iteration_ends)
        on(own.EVALUATION_STARTED, self._evaluation_starts)
        for rest in (Events.EPOCH_COMPLETED, own.METRICS_READY, Events.COMPLETED):
            on(rest, self._step_is_over)
        on(event, self)
        on(Events.COMPLETED, self._write_rest)

    def __call__(self, trainer: Trainer) -> None:
        """Write the interval's means into ``state.metrics``; a collective."""
        clock = self._clock
        clock.read()
        parts, written = (*STEP, *BETWEEN), self._written
        spent = [clock.seconds[part] - written[part] for part in parts]
        steps, self._written = clock.steps - self._steps_written, dict(clock.seconds)
        self._steps_written = clock.steps
        quantiles = [clock.durations.quantile(share) for share in (0.5, 0.99)]
        rows = agreement.gather_floats([float(steps), *quantiles, clock.seconds["startup"], *spent])
        if not min(row[0] for row in rows):
            return
        metrics, ranks = trainer.state.metrics, len(rows)
        if not self._startup_written:
            metrics["time/startup_s"], self._startup_written = max(row[3] for row in rows), True
        per_iteration = [[seconds / row[0] for seconds in row[4:]] for row in rows]
        own = [own_time(row[: len(STEP)]) for row in per_iteration]
        for index, part in enumerate(parts):
            if f"time/{part}_ms" in metrics or any(row[index] for row in per_iteration):
                metrics[f"time/{part}_ms"] = 1e3 * sum(row[index] for row in per_iteration) / ranks
        metrics["time/step_ms"] = 1e3 * sum(sum(row[: len(STEP)]) for row in per_iteration) / ranks
        for index, name in ((1, "p50"), (2, "p99")):
            metrics[f"time/step_{name}_ms"] = 1e3 * max(row[index] for row in rows)
        if ranks > 1:
            slowest = max(range(ranks), key=own.__getitem__)
            metrics["time/slowest_rank"] = float(slowest)
            metrics["time/slowest_rank_ms"] = 1e3 * own[slowest]
            others = median(seconds for rank, seconds in enumerate(own) if rank != slowest)
            metrics["time/other_ranks_ms"] = 1e3 * others
            self._ranks = self._ranks or [dict.fromkeys(STEP, 0.0) for _ in rows]
            for sums, row in zip(self._ranks, rows, strict=True):
                for index, part in enumerate(STEP):
                    sums[part] += row[4 + index]

    @property
    def host_clock(self) -> HostClock | None:
        """The clock that measures this run, for handlers that need its times; None where it is the device's."""
        return self._clock if isinstance(self._clock, HostClock) else None

    @property
    def ledger(self) -> Ledger | None:
        """Where the time of the run went over all its starts, as far as it is written; None without a directory."""
        return None if self.directory is None else read_ledger(self.directory.goodput)

    # -- a run ----------------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer) -> None:
        if self._paused and trainer.state.start is Start.CONTINUED:
            self._paused = False
            trainer.call_at_end(self._end)
            return
        if self._paused:  # the run has gone back to a checkpoint
            self._close()
        if self._began is None:
            self._began = perf_counter()
        state, update = trainer.state, trainer.update
        self._reset()
        self.verdict = None
        self._trainer = trainer
        self._says_parts = isinstance(update, Update | Updates)
        model = getattr(update, "model", None)
        self._device = getattr(update, "device", torch.device("cpu"))
        self._clock = DeviceClock(self._device) if devices.has_timing_events(self._device.type) else HostClock()
        self._clock.seconds["startup"] = perf_counter() - self._began
        self._after_backward = "reduction" if getattr(update, "rank_invariant", False) else "optimizer"
        self._hook = self._last_gradient(model)
        self._unwatch = call_around_compilations(self._compilation_starts, self._compilation_ends)
        self._checkpoints = state.checkpoints
        self._before = _Before(
            state.iteration,
            state.checkpoints,
            state.evaluations,
            dict(state.sink_seconds),
            _stalled_s(),
            _scheduled_s(),
            self._retries(),
        )
        hosts = agreement.gather_objects(socket.gethostname()) if agreement.world_size() > 1 else [""]
        self._local_ranks = hosts.count(hosts[agreement.rank()])
        self._wall = time() - (perf_counter() - self._began)
        if self.directory is not None and agreement.rank() == 0:
            with self._writing():
                self._file = LedgerFile(self.directory.goodput, fresh=state.start is Start.FRESH)
                self._beat()
        trainer.call_at_end(self._end)

    def _mark_around_others(self, trainer: Trainer) -> None:
        """Subscribe to where other handlers run within an iteration: each event costs something in each iteration."""
        on, own = trainer.add_event_handler, TrainingEvents

        def has_others(*events: Any) -> bool:
            return any(trainer.listeners(event) > (event in _ALWAYS) for event in events)

        added = self._around
        added.append(on(own.METRICS_READY, self._logging_ends))  # after those that declare themselves the last, too
        if has_others(Events.GET_BATCH_STARTED):
            added.append(on(Events.GET_BATCH_STARTED, self._step_is_over))
        if has_others(Events.GET_BATCH_COMPLETED, own.WINDOW_STARTED, Events.ITERATION_STARTED):
            added.append(on(Events.ITERATION_STARTED, self._iteration_starts))
        if has_others(own.BACKWARD_COMPLETED):
            added.append(on(own.BACKWARD_COMPLETED, self._handlers_end))
        if has_others(own.OPTIMIZER_STEP_STARTED) or self._after_backward != "optimizer":
            self._mark_before_the_step(trainer)
        if has_others(own.RESUME_POINT):
            added.append(on(own.RESUME_POINT, self._boundary_starts))
            added.append(on(own.RESUME_POINT, self._boundary_ends))
        if trainer.progress.windows is not None:
            added.append(on(own.WINDOW_COMPLETED, self._step_is_over))
            added.append(on(own.WINDOW_COMPLETED, self._handlers_end))

    def _mark_before_the_step(self, trainer: Trainer) -> None:
        on = trainer.add_event_handler
        self._around.append(on(TrainingEvents.OPTIMIZER_STEP_STARTED, self._gradients_are_there))
        self._around.append(on(TrainingEvents.OPTIMIZER_STEP_STARTED, self._step_may_start))

    def _last_gradient(self, model: Any) -> Callable[[], None]:
        """Have it marked when a backward under DDP has made the model's first gradient, usually its last one."""
        if not isinstance(model, DistributedDataParallel):
            return lambda: None
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        handle = first.register_post_accumulate_grad_hook(self._backward_has_its_gradients)
        return lambda: handle.remove()

    def _end(self, trainer: Trainer) -> None:
        """The run has ended in any way, or is paused, or goes back to a checkpoint."""
        status = trainer.state.status
        self._clock.mark(self._rest)
        self._paused = status == "running"
        if self._paused:
            self._beat()
            return
        if agreement.rank() == 0 and status in ("completed", "interrupted"):
            self._clock.read()
            figures = self._figures(trainer)
            self.verdict = verdict(figures)
            if self.verdict is not None:
                logger.warning("%s", self.verdict)
            elif (said := no_cause(figures)) is not None:
                logger.info("%s", said)
        self._beat(status=status, verdict=None if self.verdict is None else str(self.verdict))
        self._close()

    def _close(self) -> None:
        self._hook()
        self._unwatch()
        while self._around:
            self._around.pop().remove()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._began, self._paused = None, False

    def _write_rest(self, trainer: Trainer) -> None:
        """The last, perhaps shorter interval of a completed run."""
        if trainer.state.status == "completed":
            self(trainer)

    def _figures(self, trainer: Trainer) -> Figures:
        state, clock, ledger, before = trainer.state, self._clock, self.ledger, self._before
        workers = getattr(state.dataloader, "num_workers", None)
        ran_s, crowded_s = (now - then for now, then in zip(_scheduled_s(), before.scheduled_s, strict=True))
        model = getattr(trainer.update, "model", None)
        return Figures(
            clock.steps,
            {part: clock.seconds[part] for part in (*STEP, *BETWEEN)},
            p50_ms=1e3 * clock.durations.quantile(0.5),
            ranks=self._ranks,
            waits_in_forward=isinstance(model, DistributedDataParallel) and bool(shared_buffers(model)),
            detects_anomalies=torch.is_anomaly_enabled(),
            evaluations=state.evaluations - before.evaluations,
            saves=state.checkpoints - before.checkpoints,
            sinks={name: seconds - before.sinks.get(name, 0.0) for name, seconds in state.sink_seconds.items()},
            device=self._device.type,
            threads=torch.get_num_threads(),
            local_ranks=self._local_ranks,
            cores=_cores(),
            workers=workers if isinstance(workers, int) else None,
            persistent=bool(getattr(state.dataloader, "persistent_workers", False)),
            opening_s=self._opening_s,
            in_memory=_is_in_memory(state.dataloader),
            background=self._saves_in_background,
            handlers=_handlers_of_the_user(trainer),
            longest_handlers_s=clock.longest.handlers_s,
            longest_step_s=clock.longest.step_s,
            longest_step_at=before.iteration + clock.longest.step,
            stalled_s=_stalled_s() - before.stalled_s,
            crowded_s=crowded_s,
            busy_s=ran_s + crowded_s if ran_s else math.inf,
            swapped_mib=_swapped_mib(),
            retries=self._retries() - before.retries,
            growth=self._growth.found(),
            headroom_mib=Limits(memory_groups()).tightest().headroom_mib,
            caught_up=self._caught_up / max(clock.steps, 1),
            wasted_s=0.0 if ledger is None else ledger.seconds["wasted"],
            wall_s=0.0 if ledger is None else ledger.wall_s,
        )

    def _retries(self) -> int:
        """Allocations of the device that succeeded only after its cache was freed."""
        return devices.memory_statistics(self._device).get("num_alloc_retries", 0)

    # -- the ledger -----------------------------------------------------------------------------------------------

    def _beat(self, **values: Any) -> None:
        """Write what this start has spent so far."""
        now, began, clock = perf_counter(), self._began, self._clock
        if self._file is None or began is None:
            self._next_beat = math.inf
            return
        self._next_beat = now + min(max(LOST * (now - began), 0.02), 1.0)
        clock.read()
        seconds = clock.seconds
        line = {
            "began": self._wall,
            "elapsed": now - began,
            "first": self._before.iteration,
            # the state's is that of the checkpoint to which a run has gone back
            "iteration": max(self._trainer.state.iteration, self._before.iteration + self._completed),
            "status": "running",
            **{part: seconds[part] for part in ("startup", "data_wait", "evaluation", "checkpoint")},
            "handlers": seconds["handlers"] + seconds["logging"],
            "world_size": agreement.world_size(),
        }
        with self._writing():
            self._file.write(line | values)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A disk that is full, or a folder that cannot be written, ends the ledger, not the run."""
        try:
            yield
        except OSError as error:
            logger.warning("The ledger of the run's time cannot be written: %s.", error)
            if self._file is not None:
                self._file.close()
                self._file = None

    # -- marks: each says what the time since the one before it was ----------------------------------------------

    def _epoch_starts(self, trainer: Trainer) -> None:
        self._clock.mark(self._rest)
        if self._rest == "startup":
            self._mark_around_others(trainer)
        else:
            self._growth.pass_ended()
            self._opened = perf_counter()
        self._rest, self._waiting = "handlers", True  # a pass is opened next, with its workers

    def _wait_starts(self) -> None:
        self._clock.mark("data_wait" if self._waiting else "handlers")
        self._waiting = True

    def _wait_ends(self) -> None:
        self._clock.mark("data_wait")
        self._waiting = False
        if self._opened is not None:
            self._opening_s += perf_counter() - self._opened
            self._opened = None

    def _iteration_starts(self) -> None:
        self._step_is_over()

    def _forward_starts(self) -> None:
        self._clock.mark("copy")

    def _forward_ends(self) -> None:
        self._clock.mark("forward")

    def _backward_has_its_gradients(self, parameter: Any) -> None:
        self._clock.mark("backward")
        self._reduced = True

    def _backward_ends(self) -> None:
        self._clock.mark("reduction" if self._reduced else "backward")
        self._reduced = False

    def _handlers_end(self) -> None:
        self._clock.mark("handlers")

    def _gradients_are_there(self) -> None:
        self._clock.mark(self._after_backward)

    def _step_may_start(self) -> None:
        self._clock.mark("checkpoint" if self._saved else "handlers")
        self._saved = False

    def _optimizer_ends(self) -> None:
        self._clock.mark("optimizer")

    def _compilation_starts(self) -> None:
        self._step_is_over()
        self._beat()
        self._scheduled_before_s = _scheduled_s()

    def _compilation_ends(self) -> None:
        self._clock.mark("startup")
        ran_s, crowded_s = _scheduled_s()
        (ran_before_s, crowded_before_s), then = self._scheduled_before_s, self._before.scheduled_s
        without = then[0] + ran_s - ran_before_s, then[1] + crowded_s - crowded_before_s
        self._before = replace(self._before, scheduled_s=without)  # by a part of the time that is no step's

    def _iteration_ends(self) -> None:
        clock = self._clock
        clock.end_step("handlers" if self._says_parts else "update")
        self._completed += 1
        if self._completed >= self._growth.due:
            self._growth.sample(self._completed)
        if clock.caught_up():
            self._caught_up += 1
        if perf_counter() > self._next_beat:
            self._beat()

    def _step_is_over(self) -> None:
        self._clock.mark("data_wait" if self._waiting else self._rest)
        self._waiting = False

    def _logging_ends(self) -> None:
        self._clock.mark("logging")

    def _boundary_starts(self, trainer: Trainer) -> None:
        self._step_is_over()
        self._checkpoints = trainer.state.checkpoints
        self._before_step = trainer.listeners(TrainingEvents.OPTIMIZER_STEP_STARTED)

    def _boundary_ends(self, trainer: Trainer) -> None:
        state = trainer.state
        saved = state.checkpoints != self._checkpoints  # it is counted when a save begins
        self._clock.mark("checkpoint" if saved or state.background_done or state.last else self._rest)
        if saved and self._file is not None:
            self._beat()
            self._file.next_line()
        self._saved = saved and trainer.listeners(TrainingEvents.OPTIMIZER_STEP_STARTED) > self._before_step
        self._saves_in_background |= self._saved
        if self._saved and not trainer.has_event_handler(self._step_may_start, TrainingEvents.OPTIMIZER_STEP_STARTED):
            self._mark_before_the_step(trainer)  # the state is copied in the background, until the next step at most

    def _evaluation_starts(self, trainer: Trainer) -> None:
        self._step_is_over()
        self._beat()
        evaluating = trainer.state.evaluating
        if evaluating is not None:
            handle = evaluating.evaluator.add_event_handler(Events.ITERATION_COMPLETED, self._evaluates)
            evaluating.undo.callback(self._evaluation_ends)
            evaluating.undo.callback(handle.remove)

    def _evaluates(self) -> None:
        if perf_counter() > self._next_beat:
            self._clock.mark("evaluation")
            self._beat()

    def _evaluation_ends(self) -> None:
        self._clock.mark("evaluation")

    _each: Any
    for _each in (
        *(_start, _wait_ends, _forward_starts, _forward_ends, _backward_ends, _gradients_are_there, _optimizer_ends),
        *(_iteration_ends, _evaluation_starts, _step_is_over, _boundary_starts),
    ):
        _each.phase = Phase.FIRST
    for _each in (
        _epoch_starts,
        _wait_starts,
        _iteration_starts,
        _handlers_end,
        _step_may_start,
        _logging_ends,
        _boundary_ends,
    ):
        _each.phase = Phase.LAST
    del _each
    phase = Phase.LOG
    replayed = False


@dataclass(frozen=True)
class _Before:
    """Totals at the start of the run."""

    iteration: int
    checkpoints: int
    evaluations: int
    sinks: Mapping[str, float]
    stalled_s: float
    scheduled_s: tuple[float, float]
    retries: int


def _handlers_of_the_user(trainer: Trainer) -> list[str]:
    """Names of handlers that are not of this package."""
    found = []
    for listeners in trainer._event_handlers.values():
        for handler, _, _ in listeners:
            handler = getattr(handler, "handler", handler)  # behind a filter
            owner = getattr(handler, "__self__", handler)
            module = getattr(owner, "__module__", None) or type(owner).__module__
            if not str(module).startswith("ignite_engine."):
                found.append(str(getattr(handler, "__qualname__", type(handler).__name__)))
    return list(dict.fromkeys(found))


def _is_in_memory(batches: Any) -> bool:
    """Whether samples are in memory, and no function of the user makes batches of them, which may take long."""
    data, collate_fn = getattr(batches, "dataset", batches), getattr(batches, "collate_fn", default_collate)
    if isinstance(data, SeededDataset):
        data, collate_fn = data.dataset, data.collate_fn
    while isinstance(data, Subset):
        data = data.dataset
    return collate_fn is default_collate and isinstance(data, TensorDataset | Tensor | list | tuple)


def _scheduled_s() -> tuple[float, float]:
    """Seconds in which this thread ran, and was ready to and had no core; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError):
        ran, ready, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
        return int(ran) / 1e9, int(ready) / 1e9
    return 0.0, 0.0


def _cores() -> int:
    """Cores that this process may use: its affinity, and the limit of its cgroup."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        allowed = min(allowed, max(round(int(quota) / int(period)), 1))  # "max": no limit
    return allowed


def _stalled_s() -> float:
    """Seconds in which some process of this cgroup, or else of the machine, has stood still for lack of memory."""
    for path in ("/sys/fs/cgroup/memory.pressure", "/proc/pressure/memory"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            some = Path(path).read_text(encoding="ascii").splitlines()[0]
            return int(some.rpartition("total=")[2]) / 1e6
    return 0.0


def _swapped_mib() -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmSwap:"):
                return int(line.split()[1]) / 1024
    return 0.0
