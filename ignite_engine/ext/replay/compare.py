"""The first difference of two runs, or of a run and its replay, in what their folders hold."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint.digests import digests
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import CheckpointError, ReplayError
from ignite_engine.ext.replay.rerun import Build, iterations_of, rerun, start_of
from ignite_engine.ext.replay.steps import STEPS, Steps, state_name
from ignite_engine.ranks import agreement
from ignite_engine.runs.run_directory import RunDirectory, config_differences
from ignite_engine.text import METRICS, flat, lines_of

_LEFT_OUT = re.compile(r"(^|\.|, )(memory|throughput|time)/|^the state of trainer( of rank \d+)?, checkpoints$")
"""Names of values that clocks and the machine decide, and how often was saved."""
_TRAIL = "lines of the trail"
_DECIDES_NOTHING = re.compile(
    r"config\.(run\.(directory|name):|handlers\.(ClearML|MetricLogger|MLflow|Progress|Report|Checkpoint\.keep_))"
    r"|environment\.(command|working_directory|variables)\b"
)


@dataclass(frozen=True)
class Difference:
    """The first thing in which two folders differ; what is not there is None."""

    iteration: int
    where: str
    what: str
    first: Any
    second: Any

    def __str__(self) -> str:
        values = " and ".join("none" if value is None else _short(value) for value in (self.first, self.second))
        return f"iteration {self.iteration}, {self.where}: {self.what} ({values})"


@dataclass
class Comparison:
    """What was compared, and found.

    Attributes:
        difference: the first one; None: there is none.
        equal: the iterations before it whose lines, or checkpoints, are equal, by the name of what holds them.
    """

    difference: Difference | None = None
    equal: dict[str, list[int]] = field(default_factory=dict)

    def __str__(self) -> str:
        found = [f"{len(iterations)} {where}" for where, iterations in self.equal.items() if iterations]
        return ", ".join(found) or "nothing that both have"


def compare(
    first: str | Path, second: str | Path, upto: int, *, since: int = 0, ignore: Collection[str] = ()
) -> Comparison:
    """Compare two runs up to an iteration: their logs, trails and checkpoints.

    What clocks and the machine decide is not compared, nor how often was saved. The second may be the replay of the
    first, or have ended there: then its last line may have more.

    Args:
        since: what comes after this iteration.
        ignore: names of values that may differ.
    """
    folders = Path(first), Path(second)
    result, found = Comparison(), list[Difference]()
    # what is logged where a run is stopped, a replay that only pauses there does not log
    is_complete = RunDirectory(folders[0]).read_summary().get("status") == "completed"
    stopped_at = None if is_complete else iterations_of(folders[0])

    def look(where: str, first: Mapping[int, Any], second: Mapping[int, Any], numbers: Iterable[int], end: int) -> None:
        equal = result.equal[where] = []
        for number in sorted(number for number in numbers if since < number <= end):
            pair = first.get(number), second.get(number)
            try:
                difference = _difference(number, where, *pair, ignore, number == upto, number == stopped_at)
            except CheckpointError as damage:
                difference = Difference(number, where, str(damage).rstrip("."), None, None)
            if difference is not None:
                found.append(difference)
                return
            if None not in pair:
                equal.append(number)

    ranks = len(list(folders[0].glob(STEPS.format("*"))))
    logs = {f"steps of rank {rank}": STEPS.format(rank) for rank in range(ranks)}
    one: Mapping[int, Any]
    other: Mapping[int, Any]
    for where, name in {**logs, "log lines": METRICS, _TRAIL: "trail.jsonl"}.items():
        one, other = (_lines(folder / name) for folder in folders)
        # a trail may be written at another interval
        look(where, one, other, one.keys() & other.keys() if where == _TRAIL else one.keys() | other.keys(), upto)
    one, other = (
        {info.iteration: info for info in CheckpointStore(RunDirectory(folder).checkpoints).checkpoints()}
        for folder in folders
    )
    look("checkpoints", one, other, one.keys() & other.keys(), min([upto, *(found.iteration for found in found)]))
    result.difference = min(found, key=lambda difference: difference.iteration, default=None)
    return result


def _lines(path: Path) -> dict[int, dict[str, Any]]:
    """The lines of a log by their iterations; the last one of several."""
    return {line["iteration"]: flat(line) for line in lines_of(path)}


def _difference(
    number: int, where: str, one: Any, other: Any, ignore: Collection[str], second_ends: bool, first_ends: bool
) -> Difference | None:
    if one is None or other is None:
        missing = [None if line is None else "there" for line in (one, other)]
        left_out = second_ends if one is None else first_ends
        return None if left_out else Difference(number, where, "a line", *missing)
    if isinstance(one, CheckpointInfo):
        one, other = _pieces(one, other), _pieces(other, one)
    if where == _TRAIL and one.get("hash") != other.get("hash"):  # digests of other functions
        return None
    for name in sorted({**one, **other}, key=lambda name: name == "all"):  # after what it is the digest of
        left_out = (second_ends and name not in one) or (first_ends and name not in other)
        ignored = left_out or name in ignore or _LEFT_OUT.search(name)
        if not ignored and one.get(name) != other.get(name):
            return Difference(number, where, name, one.get(name), other.get(name))
    return None


def _pieces(checkpoint: CheckpointInfo, other: CheckpointInfo) -> dict[str, str]:
    """Digests of what decides the rest of a run, the weights first: not of what logs, nor how often was saved."""
    store, kinds = CheckpointStore(checkpoint.path.parent), checkpoint.manifest.kinds
    ranks = checkpoint.manifest.world_size
    parts: dict[str, tuple[str, Any]] = {}
    for rank in range(ranks if ranks == other.manifest.world_size else 0):
        local = store.load(checkpoint.path, rank, shared=False).local
        parts |= {f"{name}{f' of rank {rank}' if rank else ''}": (name, state) for name, state in local.items()}
    shared = store.load(checkpoint.path).shared
    parts = {name: (name, state) for name, state in shared.items()} | parts
    return {
        state_name(label).format(piece).rstrip(", "): text
        for label, (name, state) in sorted(parts.items(), key=lambda part: kinds.get(part[1][0]) != "model")
        if kinds.get(name) != "log"
        for piece, text in digests(state).items()
    }


def _short(value: Any) -> str:
    text = str(value).removeprefix("sha256:")
    return text[:12] if text != str(value) else text if len(text) <= 48 else f"{text[:45]}..."


# --------------------------------------------------------------------------------------------------- compare-runs


@dataclass
class RunComparison:
    """What two runs differ in.

    Attributes:
        settings: of their configs, and then of their environments, a line each.
        common: iterations that both have.
        files: what their folders say.
        began_at: the iteration from which both were trained again; None: their folders are equal.
        cause: what differed first in that.
        notes: where a run is not what its config makes.
    """

    settings: list[str]
    common: int
    files: Comparison
    began_at: int | None = None
    cause: Difference | None = None
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        lines = [*self.settings, f"Equal: {self.files}, of {self.common} iterations that both have."]
        if self.files.difference is None:
            return [*lines, "Nothing that was logged or saved differs."]
        seen = self.files.difference
        again = f"Both were trained again from iteration {self.began_at} to {seen.iteration}."
        cause = [] if self.cause is None else [f"First difference: {self.cause}."]
        return [*lines, f"First sign: {seen}.", again, *self.notes, *cause]


def compare_runs(
    first: str | Path, second: str | Path, first_build: Build | None = None, second_build: Build | None = None
) -> RunComparison:
    """Find the first iteration at which two runs differ, and in what; nothing in their folders is written.

    Their folders are compared first. Where they differ both are trained again from the newest checkpoint before that is
    equal in both, or from their starts, and each iteration is compared: its samples, the bytes of its batch, random
    generators, weights before the step, gradients, rates, loss, states of optimizers, weights after it. A collective.

    Args:
        first_build, second_build: as of :func:`~ignite_engine.ext.replay.rerun`; None: the second is the first.

    Raises:
        ReplayError: one line; a folder holds no run, or cannot be replayed.
    """
    folders = Path(first), Path(second)
    result = agreement.on_rank_0(lambda: _files(*folders))
    seen = result.files.difference
    if seen is None:
        return result
    equal = [number for number in result.files.equal["checkpoints"] if number < seen.iteration]
    since = result.began_at = max(equal, default=0)
    scratch = agreement.on_rank_0(lambda: Path(tempfile.mkdtemp(prefix="compare-runs-")))
    copies = scratch / "first", scratch / "second"
    try:
        for folder, build, copy in zip(folders, (first_build, second_build or first_build), copies, strict=True):
            rerun(folder, seen.iteration, since=since, build=build, attach=Steps(copy).attach, folder=copy)
        agreement.wait_for_all()
        result.cause, *own = agreement.on_rank_0(
            lambda: [
                compare(one, other, seen.iteration, since=since).difference
                for one, other in (copies, *zip(folders, copies, strict=True))
            ]
        )
    finally:
        if agreement.rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    for folder, difference in zip(folders, own, strict=True):
        if difference is not None:
            result.notes.append(f"{folder} is not what its config makes: {difference}.")
    if result.cause is None and not result.notes:
        result.notes.append("Trained again they are equal: their configs, code and data do not make what differs.")
    return result


def _files(first: Path, second: Path) -> RunComparison:
    lengths = [iterations_of(folder) for folder in (first, second)]
    if not (common := min(lengths)):
        raise ReplayError(
            f"{first} and {second} are not the folders of two runs: there is no iteration that both have."
        )
    starts = [start_of(folder, common) for folder in (first, second)]
    settings = [{"config": start.config, "environment": start.environment} for start in starts]
    changes = [line for line in config_differences(*settings) if not _DECIDES_NOTHING.match(line)]
    folders = (first, second) if lengths[0] >= lengths[1] else (second, first)
    files = compare(*folders, common)
    if folders[0] != first and (seen := files.difference) is not None:
        files.difference = replace(seen, first=seen.second, second=seen.first)
    return RunComparison(changes, common, files)
