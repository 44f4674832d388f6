"""Why a run was not faster: from measured figures to one sentence, or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ignite_engine.errors import shortened

SHORTEST_S = 5.0
"""A shorter run is not judged: its first iterations, which warm up, weigh too much."""
FEWEST_STEPS = 20
"""Nor is one of fewer steps."""
DATA = 0.2
"""Share of the time spent waiting for data: below it more workers gain less than a fifth."""
LEAST_WAIT_MS = 1.0
"""Nor does a shorter wait in an iteration: a worker takes about as long to hand a batch over."""
SAVING = 0.1
"""Share of saving; an interval that Young's rule would choose for a failure each hour and saves of 10 s costs 7 %."""
FEWEST_SAVES = 3
"""Fewer, the one at the end among them, cannot be made rarer."""
EVALUATING = 0.4
"""Share of evaluation: one each epoch of a set of a fifth of the data takes less, as it needs no backward."""
FEWEST_EVALUATIONS = 2
"""Fewer cannot be made rarer."""
HANDLERS = 0.1
"""Share of logging and other handlers, which ought to take next to nothing."""
LEAST_HANDLERS_MS = 0.5
"""Nor does less in an iteration: the engine and a dozen handlers of daily use take about as long on a busy machine."""
SLOW_RANK = 0.15
"""Share of the step by which one rank takes longer than the median of the others."""
WASTED = 0.15
"""Share of the wall time of all starts whose training was lost to kills."""
STALLED = 0.05
"""Share of the time in which the kernel had stalled processes for lack of memory (its pressure-stall information)."""
SWAPPED_MIB = 64.0
"""Memory of this process in swap: less than this it never uses again."""
RETRIES = 0.05
"""Allocations for each step that succeeded only after the device's cache was freed, which waits for the device."""
THREADS = 1.5
"""Threads that compute for each core: at more they wait for each other within each operation."""
CROWDED = 0.25
"""Share of the time in which the training thread was ready to run and had no core."""
ASLEEP = 0.25
"""Share of the time in which the training thread slept within updates, for none of what the engine waits for."""
OPENING = 0.5
"""Share of the waits for data that fell on the beginnings of passes, where workers start."""
ONE_STEP = 0.2
"""Share of the time of one step, after the first two, which compile and warm up."""
LEAK_MIB, LEAK = 48.0, 0.1
"""Growth of a process, and as a share of what it holds: less may be its allocator's."""
SOON = 10.0
"""Memory that is full after so many times the run's iterations is a cause whatever its share."""
SOON_S = 3600.0
"""And so is memory that a clear leak fills within an hour: a trial run is shorter than the run it is for."""
TINY_MS = 0.5
"""A step on a CPU: below it calling operations and fetching single samples takes most of the time."""
CAUGHT_UP = 0.8
"""Share of steps at whose end the device had nothing left to do: the host is slower than it."""

NAMED = 0.05
"""Share of the time that is named where nothing is wrong."""


@dataclass(frozen=True)
class Growth:
    """Memory of the training process that has grown steadily."""

    steps: int
    """In which it has grown."""
    grown_mib: float
    held_mib: float
    """In the end."""
    in_first_pass: bool = False
    """It was seen in the first pass over the data only, in which a data set may fill a cache."""


@dataclass(frozen=True)
class Figures:
    """What was measured of the last start of a run.

    Attributes:
        steps: iterations.
        seconds: of this process by part, as :class:`~ignite_engine.handlers.StepTimes` measures them.
        p50_ms: the median step.
        ranks: seconds by part of each rank, at the same number of steps; empty on one process.
        waits_in_forward: there the ranks wait for each other, too: DDP sends the model's buffers to all.
        detects_anomalies: ``torch.autograd.set_detect_anomaly`` is on.
        evaluations, saves: how many there were.
        sinks: seconds of each sink by its name.
        device: the type of the model's device.
        threads: of torch in this process.
        local_ranks: processes that train on this machine.
        cores: that they may use.
        workers: of the loader; None: it has no such setting.
        persistent: they are kept between passes.
        opening_s: from where a pass, but the first, began to its first batch.
        in_memory: the loader's data set is tensors or a list.
        background: saves are written in the background.
        handlers: names of the user's own handlers; None: not known.
        longest_handlers_s: the longest time of handlers within one iteration, logging among them.
        longest_step_s, longest_step_at: the longest step without its wait for data, and its iteration.
        crowded_s: in which the training thread was ready to run and had no core.
        busy_s: the same, and in which it ran; infinite where the kernel does not tell.
        stalled_s: the kernel's pressure-stall time of memory.
        swapped_mib: of this process, now.
        retries: of the device's allocator.
        growth: of this process's memory; None: it has not grown steadily.
        headroom_mib: what may be taken yet of the machine's memory, or of a control group's.
        caught_up: share of steps at whose end the device had nothing left to do.
        wasted, wall_s: of all starts of the run: what was lost to kills, and its whole time.
    """

    steps: int
    seconds: Mapping[str, float]
    p50_ms: float = math.inf
    ranks: Sequence[Mapping[str, float]] = ()
    waits_in_forward: bool = False
    detects_anomalies: bool = False
    evaluations: int = 0
    saves: int = 0
    sinks: Mapping[str, float] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1
    local_ranks: int = 1
    cores: int = 1
    workers: int | None = None
    persistent: bool = False
    opening_s: float = 0.0
    in_memory: bool = False
    background: bool = False
    handlers: Sequence[str] | None = None
    longest_handlers_s: float = 0.0
    longest_step_s: float = 0.0
    longest_step_at: int = 0
    crowded_s: float = 0.0
    busy_s: float = math.inf
    stalled_s: float = 0.0
    swapped_mib: float = 0.0
    retries: int = 0
    growth: Growth | None = None
    headroom_mib: float = math.inf
    caught_up: float = 0.0
    wasted_s: float = 0.0
    wall_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def share(self, *parts: str) -> float:
        return sum(self.seconds.get(part, 0.0) for part in parts) / self.total_s

    def each_ms(self, *parts: str) -> float:
        """Milliseconds of a step."""
        return 1e3 * sum(self.seconds.get(part, 0.0) for part in parts) / self.steps


@dataclass(frozen=True)
class Verdict:
    """Why a run was not faster.

    Attributes:
        cause: in one or two words.
        evidence: the figures.
        remedy: the next step to take.
        share: of the time that it has cost, as far as it can be told.
    """

    cause: str
    evidence: str
    remedy: str
    share: float

    def __str__(self) -> str:
        return f"The run was limited by {self.cause}: {self.evidence}; {self.remedy}."


def verdict(figures: Figures) -> Verdict | None:
    """The cause that has cost most; None: nothing is wrong, or too little was measured."""
    if not _is_judged(figures):
        return None
    verdicts = [verdict for rule in _RULES if (verdict := rule(figures)) is not None]
    # what slows everything else cannot be told as a share, and may be the cause of the other shares
    return max(verdicts, key=lambda verdict: verdict.share, default=None)


def no_cause(figures: Figures) -> str | None:
    """What is said of a run without a :func:`verdict`: where its time went; None: too little was measured."""
    if not _is_judged(figures):
        return None
    parts = {
        "training": figures.share("copy", "forward", "backward", "reduction", "optimizer", "update"),
        **{PART_NAMES[part]: figures.share(part) for part in ("data_wait", "evaluation", "checkpoint")},
        "logging and handlers": figures.share("logging", "handlers"),
    }
    named = [f"{name} {_percent(share)}" for name, share in parts.items() if share >= NAMED]
    return f"Nothing stands out that slowed the run: of its time {', '.join(named)}."


def _is_judged(figures: Figures) -> bool:
    return figures.steps >= FEWEST_STEPS and figures.total_s >= SHORTEST_S


def _threads(figures: Figures) -> Verdict | None:
    running = figures.threads * figures.local_ranks
    if figures.device != "cpu" or running <= THREADS * figures.cores:
        return None
    threads = max(figures.cores // figures.local_ranks, 1)
    processes = f"{figures.local_ranks} processes with " if figures.local_ranks > 1 else ""
    return Verdict(
        "too many threads",
        f"{processes}{figures.threads} threads{' each' if processes else ''} on {_cores(figures.cores)}",
        f"set run.threads={threads}, or OMP_NUM_THREADS={threads} before Python starts",
        math.inf,
    )


def _detects_anomalies(figures: Figures) -> Verdict | None:
    if not figures.detects_anomalies:
        return None
    return Verdict(
        "anomaly detection",
        "torch.autograd.set_detect_anomaly is on, which keeps a stack of each operation and looks at each gradient",
        "turn it off where no NaN is looked for",
        math.inf,
    )


def _lack_of_memory(figures: Figures) -> Verdict | None:
    share = figures.stalled_s / figures.total_s
    if share > STALLED:
        evidence = f"processes stood still for lack of memory {_percent(share)} of the time"
        return Verdict(
            "memory", evidence, "use fewer loader workers, a smaller batch, or a machine with more", math.inf
        )
    if figures.swapped_mib > SWAPPED_MIB:
        evidence = f"{figures.swapped_mib:,.0f} MiB of this process are in swap"
        return Verdict(
            "memory", evidence, "use fewer loader workers, a smaller batch, or a machine with more", math.inf
        )
    if figures.retries / figures.steps > RETRIES:
        evidence = (
            f"the device's cache was freed {figures.retries} times in {figures.steps:,} iterations to find memory"
        )
        remedy = "use a smaller batch with update.accumulation_steps, or PYTORCH_ALLOC_CONF=expandable_segments:True"
        return Verdict("the device's memory", evidence, remedy, math.inf)
    return None


def _leak(figures: Figures) -> Verdict | None:
    growth = figures.growth
    if growth is None or growth.grown_mib < LEAK_MIB:
        return None
    rate = growth.grown_mib / growth.steps
    left = figures.headroom_mib / rate
    is_clear = not growth.in_first_pass and growth.grown_mib >= LEAK * growth.held_mib
    is_soon = left < SOON * figures.steps
    if not is_soon and not is_clear:
        return None
    is_soon |= left * figures.total_s / figures.steps < SOON_S
    full = f", and the {figures.headroom_mib:,.0f} MiB that are left are full in {left:,.0f} iterations"
    return Verdict(
        "a memory leak",
        f"this process grew steadily, {1000 * rate:,.3g} MiB in 1,000 iterations, to {growth.held_mib:,.0f} MiB"
        f"{full if math.isfinite(left) else ''}",
        "look for what is kept from each iteration: losses or outputs in a list (keep loss.item(), or loss.detach() "
        "where it is to stay a tensor), a graph that is never freed, a cache without a limit",
        math.inf if is_soon else 0.0,
    )


def _crowded(figures: Figures) -> Verdict | None:
    share = figures.crowded_s / figures.total_s
    if share <= CROWDED:
        return None
    # the training thread's own work has the same share on free cores; workers may wait for a core themselves
    rules = (_saving, _evaluating, _handlers, *((_data,) if figures.workers == 0 else ()))
    if any(found.share > share for rule in rules if (found := rule(figures)) is not None):
        return None
    workers = ", use fewer loader workers" if (figures.workers or 0) > 1 else ""
    fewer = f", or set run.threads below {figures.threads}" if figures.threads > 1 else ""
    return Verdict(
        "busy cores",
        f"the training thread was ready {_percent(share)} of the time and had no core to run on",
        f"stop other work on this machine{workers}{fewer}",
        math.inf,
    )


def _asleep(figures: Figures) -> Verdict | None:
    if figures.device != "cpu" or figures.ranks or figures.crowded_s > NAMED * figures.total_s:
        return None  # it may have waited for a device, a rank, or other threads that had no core
    known = figures.share("data_wait", "evaluation", "checkpoint", "logging", "handlers")
    share = 1 - known - figures.busy_s / figures.total_s
    if share <= ASLEEP:
        return None
    return Verdict(
        "waiting",
        f"the training thread slept {_percent(share)} of the time, {1e3 * share * figures.total_s / figures.steps:.3g} "
        "ms an iteration, within the updates",
        "look for what loss_fn, the network or a hook waits for: a service, a file, a lock; ask for it where samples "
        "are made, in workers of the loader, or once before training",
        share,
    )


def _one_step(figures: Figures) -> Verdict | None:
    share = figures.longest_step_s / figures.total_s
    if share <= ONE_STEP:
        return None
    return Verdict(
        "one iteration",
        f"iteration {figures.longest_step_at:,} took {figures.longest_step_s:.3g} s, {_percent(share)} of the time, "
        f"where half of the steps take less than {figures.p50_ms:.3g} ms",
        "if it was compiled again there, give batches of one shape (data.drop_last), or compile with dynamic=True",
        share,
    )


def _slow_rank(figures: Figures) -> Verdict | None:
    if len(figures.ranks) < 2:
        return None
    waits = [("reduction",), *([("reduction", "forward")] if figures.waits_in_forward else [])]
    found = [verdict for parts in waits if (verdict := _slow_rank_beside(figures, parts)) is not None]
    return max(found, key=lambda verdict: verdict.share, default=None)


def _slow_rank_beside(figures: Figures, waits: Sequence[str]) -> Verdict | None:
    """A rank that takes longer without the parts in which ranks wait for each other."""
    own = [{part: seconds for part, seconds in rank.items() if part not in waits} for rank in figures.ranks]
    own_seconds = [sum(rank.values()) for rank in own]
    slowest = max(range(len(own)), key=own_seconds.__getitem__)
    others = [rank for number, rank in enumerate(own) if number != slowest]
    usual = median(seconds for number, seconds in enumerate(own_seconds) if number != slowest)
    share = (own_seconds[slowest] - usual) / figures.total_s
    if share <= SLOW_RANK:
        return None
    more = {part: seconds - median(other_rank[part] for other_rank in others) for part, seconds in own[slowest].items()}
    part = max(more, key=more.__getitem__)
    each_ms = 1e3 / figures.steps
    beside, there = (" without the forward", " there") if "forward" in waits else ("", "")
    return Verdict(
        f"rank {slowest}",
        f"it takes {own_seconds[slowest] * each_ms:.3g} ms an iteration{beside} where the others take "
        f"{usual * each_ms:.3g} ms and wait for it{there}; {more[part] * each_ms:.3g} ms of that in {PART_NAMES[part]}",
        "look at that rank's machine, and at its share of the data"
        if part != "data_wait"
        else "look at that rank's disk, and at its share of the data",
        share,
    )


def _data(figures: Figures) -> Verdict | None:
    share = figures.share("data_wait")
    if share <= DATA or figures.each_ms("data_wait") < LEAST_WAIT_MS:
        return None
    evidence = f"{_percent(share)} of the time, {_ms(figures, 'data_wait')} an iteration, was spent waiting for it"
    room = max(figures.cores // figures.local_ranks, 1)
    if figures.in_memory and figures.workers:
        evidence += f" with num_workers={figures.workers}, and it is in memory"
        remedy = "set data.num_workers=0: to hand a batch over takes a worker longer than to make it"
    elif figures.workers and not figures.persistent and figures.opening_s > OPENING * figures.seconds["data_wait"]:
        evidence += f", most of it at the beginning of epochs, where its {figures.workers} workers start anew"
        remedy = "set data.persistent_workers=true, loader(..., persistent_workers=True)"
    elif figures.in_memory:  # to hand a batch over takes a worker longer than to make it
        evidence += ", and it is in memory"
        remedy = (
            "give its data set a __getitems__(indices) that returns a whole batch, with collate_fn=lambda batch: "
            "batch; not workers"
        )
    elif figures.workers is None:
        remedy = "make the loader faster, or give one with num_workers"
    elif figures.workers < room:
        more = max(min(room, max(2 * figures.workers, 2)), 1)
        evidence += f" with num_workers={figures.workers}"
        remedy = f"set data.num_workers={more}, loader(..., num_workers={more})"
    else:
        evidence += f" with num_workers={figures.workers} on {_cores(figures.cores)}"
        remedy = "do less work for each sample: decode and resize once, and store the result"
    return Verdict("data", evidence, remedy, share)


def _saving(figures: Figures) -> Verdict | None:
    share = figures.share("checkpoint")
    if share <= SAVING or figures.saves < FEWEST_SAVES:
        return None
    interval = max(figures.steps / figures.saves, 1)
    rarer = _rounded(interval * share / (SAVING / 5))
    background = "" if figures.background else ", or checkpoint.background=true"
    return Verdict(
        "saving",
        f"{figures.saves} checkpoints took {_percent(share)} of the time, one about every {interval:,.0f} iterations",
        f"set checkpoint.every={rarer}{background}",
        share,
    )


def _evaluating(figures: Figures) -> Verdict | None:
    share = figures.share("evaluation")
    if share <= EVALUATING or figures.evaluations < FEWEST_EVALUATIONS:
        return None
    interval = max(figures.steps / figures.evaluations, 1)
    rarer = _rounded(interval * share / (1 - share) / 0.1)
    return Verdict(
        "evaluation",
        f"{figures.evaluations} evaluations took {_percent(share)} of the time, one about every {interval:,.0f} "
        "iterations",
        f"set evaluation.every={rarer}, or evaluation.limit to fewer batches",
        share,
    )


def _handlers(figures: Figures) -> Verdict | None:
    share = figures.share("handlers", "logging")
    often = share - figures.longest_handlers_s / figures.total_s  # what took long once cannot be made rarer
    if often <= HANDLERS or figures.each_ms("handlers", "logging") < LEAST_HANDLERS_MS:
        return None
    evidence = f"they took {_percent(share)} of the time, {_ms(figures, 'handlers', 'logging')} an iteration"
    sink = max(figures.sinks, key=lambda name: figures.sinks[name], default="")
    if sink and figures.sinks[sink] > figures.total_s * share / 2:
        remedy = "set logging.every to a larger interval, or leave that sink out"
        return Verdict("logging", f"{evidence}, most of it in the sink {sink!r}", remedy, share)
    if figures.share("logging") > max(HANDLERS, share / 2) and figures.each_ms("logging") >= LEAST_HANDLERS_MS:
        logged = f"it took {_percent(figures.share('logging'))} of the time, {_ms(figures, 'logging')} an iteration"
        return Verdict("logging", logged, "set logging.every to a larger interval", figures.share("logging"))
    if figures.handlers is not None and not figures.handlers:
        return None  # the engine and its handlers: a user cannot attach them to rarer events
    named = f" ({shortened(figures.handlers, 3)})" if figures.handlers else ""
    remedy = f"attach them{named} to rarer events, such as Events.ITERATION_COMPLETED(every=100)"
    return Verdict("handlers", evidence, remedy, share)


def _wasted(figures: Figures) -> Verdict | None:
    share = figures.wasted_s / figures.wall_s if figures.wall_s else 0.0
    if share <= WASTED:
        return None
    evidence = f"{_percent(share)} of the run's whole time, {figures.wasted_s:,.0f} s, was lost to kills"
    return Verdict("saving too seldom", evidence, "save more often: a smaller checkpoint.every", share)


def _overhead(figures: Figures) -> Verdict | None:
    if figures.device != "cpu" and figures.caught_up > CAUGHT_UP:
        evidence = f"the device had nothing left to do at the end of {_percent(figures.caught_up)} of the iterations"
        return Verdict("the host", evidence, "use a larger batch, or compile the model with torch.compile", 0.0)
    if figures.device == "cpu" and figures.p50_ms < TINY_MS:
        evidence = f"half of the steps take less than {figures.p50_ms:.2g} ms, most of it calls, not arithmetic"
        return Verdict("tiny batches", evidence, "use a larger data.batch_size", 0.0)
    return None


PART_NAMES = {
    "data_wait": "waiting for data",
    "copy": "copying to the device",
    "forward": "the forward",
    "backward": "the backward",
    "reduction": "the reduction",
    "optimizer": "the optimizer",
    "update": "the update",
    "evaluation": "evaluation",
    "checkpoint": "saving",
    "logging": "logging",
    "handlers": "handlers",
}

_RULES: tuple[Callable[[Figures], Verdict | None], ...] = (
    _threads,
    _lack_of_memory,
    _leak,
    _crowded,
    _detects_anomalies,
    _slow_rank,
    _data,
    _saving,
    _evaluating,
    _handlers,
    _wasted,
    _asleep,
    _one_step,
    _overhead,
)


def _rounded(number: float) -> int:
    """Up to a number with one digit that is not zero."""
    power = 10 ** math.floor(math.log10(number)) if number >= 1 else 1
    return int(math.ceil(number / power) * power)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(figures: Figures, *parts: str) -> str:
    return f"{figures.each_ms(*parts):.3g} ms"


def _cores(cores: int) -> str:
    return f"{cores} core{'s' if cores != 1 else ''}"
