"""The time of a run over all its starts, in parts that sum to its wall time; also of starts that were killed.

Each start of the run writes lines of its own into ``goodput.jsonl``: how long it has run, and what of it went where.
The newest line is written again several times a second, so that a kill loses no more than that; a new one begins at
each checkpoint, so that it is known what had been spent when the state was saved that the next start resumes.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ignite_engine.run_directory import lines_of

PARTS = {
    "productive": "training that was kept",
    "data_wait": "waiting for data",
    "evaluation": "evaluation",
    "checkpoint": "saving",
    "handlers": "logging and other handlers",
    "startup": "start-up",
    "restart": "start-up of later starts",
    "downtime": "no process ran",
    "wasted": "done again, or lost",
}
"""The parts of the wall time, and their names on the page."""

COUNTED = ("data_wait", "evaluation", "checkpoint", "handlers", "startup")
"""The parts in a line; the rest of ``elapsed`` is training."""


@dataclass(frozen=True)
class Ledger:
    """Where the wall time of a run went.

    Attributes:
        seconds: by the names of ``PARTS``; their sum is the wall time from the beginning of the first start to the end
            of the last one, as far as it is known.
        starts: processes that have trained it.
        verdict: why the last start was not faster, as it said at its end; None: nothing was wrong, or it was killed.
        failures: starts that were killed or failed, and were followed by another.
        recovery_s: from the ends of those to the ends of the start-ups that followed.
        saves: checkpoints on disk.
    """

    seconds: Mapping[str, float]
    starts: int
    verdict: str | None = None
    failures: int = 0
    recovery_s: float = 0.0
    saves: int = 0

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the wall time that was training that was kept, 0 to 1."""
        return self.seconds["productive"] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def bound(self) -> float | None:
        """The goodput that theory gives for the failures that were seen, 0 to 1; None: there were none.

        Of saves at the best interval for their mean time C, the mean time M between failures and the mean time R to
        start again it is ``1 - sqrt(2 C / M) - R / M``. A run whose copies are in memory may be above it.

        Source: Young 1974, Communications of the ACM 17(9); Daly 2006, Future Generation Computer Systems 22(3).
        """
        if not self.failures or self.wall_s <= 0:
            return None
        between_s = self.wall_s / self.failures
        save_s = self.seconds["checkpoint"] / self.saves if self.saves else 0.0
        return max(1.0 - math.sqrt(2 * save_s / between_s) - self.recovery_s / self.wall_s, 0.0)

    def as_values(self) -> dict[str, Any]:
        """For ``summary.json``."""
        return {
            "goodput": self.goodput,
            "wall_s": self.wall_s,
            "starts": self.starts,
            "failures": self.failures,
            "recovery_s": self.recovery_s,
            "bound": self.bound,
            **{f"{part}_s": seconds for part, seconds in self.seconds.items()},
        }


def read_ledger(path: str | Path) -> Ledger | None:
    """The ledger of a run from its ``goodput.jsonl``; None: there is none."""
    starts = _starts(_lines(Path(path)))
    return _summed(starts) if starts else None


def goodput_line(values: Mapping[str, Any]) -> str:
    """One line: the goodput, and what else has taken a hundredth of the time, the largest first."""
    wall = values["wall_s"] or 1.0
    others = sorted(((values[f"{part}_s"] / wall, name) for part, name in PARTS.items() if part != "productive"))
    said = ", ".join(f"{100 * share:.0f} % {name}" for share, name in reversed(others) if share >= 0.01)
    return f"Goodput {100 * values['goodput']:.0f} %{f'; {said}' if said else ''}.{failures_text(values)}"


def failures_text(values: Mapping[str, Any]) -> str:
    """`` 3 failures, ...``: how often the run failed, what that took, and what theory gives for it; or nothing."""
    if not (failures := values.get("failures")):
        return ""
    return (
        f" {failures} failure{'s' if failures > 1 else ''}, one every {values['wall_s'] / failures:.3g} s, each "
        f"{values['recovery_s'] / failures:.2g} s until it trained again: at most {100 * values['bound']:.0f} % by "
        "Young and Daly."
    )


def _summed(starts: Sequence[Sequence[Mapping[str, Any]]]) -> Ledger:
    seconds = dict.fromkeys(PARTS, 0.0)
    cut, until = math.inf, math.inf  # what a later start has trained again, and when the next one began
    failures, recovery_s, startup_after = 0, 0.0, 0.0
    for number, lines in reversed(list(enumerate(starts))):
        last = lines[-1]
        kept = _kept(lines, cut)
        for part in ("data_wait", "evaluation", "checkpoint", "handlers"):
            seconds[part] += kept[part]
        seconds["restart" if number else "startup"] += kept["startup"]
        trained = kept["elapsed"] - sum(kept[part] for part in COUNTED)
        seconds["productive"] += max(trained, 0.0)
        seconds["wasted"] += max(last["elapsed"] - kept["elapsed"], 0.0)
        if until < math.inf and last.get("status") != "completed":
            pause = max(until - last["began"] - last["elapsed"], 0.0)  # a clock may be set back
            seconds["downtime"] += pause
            if last.get("status") != "interrupted":
                failures, recovery_s = failures + 1, recovery_s + pause + startup_after
        cut, until, startup_after = min(cut, last["first"]), last["began"], last["startup"]
    saves = sum(len(lines) - 1 for lines in starts)
    return Ledger(seconds, len(starts), starts[-1][-1].get("verdict"), failures, recovery_s, saves)


def _kept(lines: Sequence[Mapping[str, Any]], cut: float) -> Mapping[str, Any]:
    """What a start had spent when it reached iteration ``cut``, from which a later one has trained again."""
    last = lines[-1]
    if last["iteration"] <= cut:
        return last
    startup = lines[0]["startup"]  # that of a later line may hold compilations after the first
    began = {**dict.fromkeys(COUNTED, 0.0), "startup": startup, "elapsed": startup}
    known = [began | {"iteration": last["first"]}, *lines]
    before = next((line for line in reversed(known) if line["iteration"] <= cut), known[0])
    if before["iteration"] >= cut:
        return before
    after = next(line for line in known if line["iteration"] > cut)
    share = (cut - before["iteration"]) / (after["iteration"] - before["iteration"])
    return {name: before[name] + share * (after[name] - before[name]) for name in ("elapsed", *COUNTED)}


def _starts(lines: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    found: list[list[Mapping[str, Any]]] = []
    for line in lines:
        if found and found[-1][-1]["began"] == line["began"]:
            found[-1].append(line)
        else:
            found.append([line])
    return found


def _lines(path: Path) -> list[Mapping[str, Any]]:
    """The lines that can be read; a kill may have torn one."""
    keys = ("began", "elapsed", "first", "iteration", *COUNTED)
    return [line for line in lines_of(path) if all(_is_usable(line.get(key)) for key in keys)]


def _is_usable(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e15


class LedgerFile:
    """Writes the lines of one start; rank 0 alone has one."""

    _WIDTH = 320
    """Bytes of a line; blanks fill it, so that a line is written over by one call, and no part of it stays."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        """Begin the lines of a start.

        Args:
            fresh: the run starts over. What an earlier one has left is dropped, unless it was killed: then the same run
                is started again, and what it had done is wasted.

        Raises:
            OSError: the file cannot be written, or another process writes it.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = _lines(path) if fresh else []
        over = bool(earlier) and earlier[-1].get("status", "running") != "running"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(self._file)
            raise OSError(f"{path} is being written by another process, give this run a directory of its own") from None
        except OSError:
            pass  # a file system without locks
        if fresh and over:
            os.ftruncate(self._file, 0)
        self._at = os.fstat(self._file).st_size
        if self._at and os.pread(self._file, 1, self._at - 1) != b"\n":
            os.pwrite(self._file, b"\n", self._at)
            self._at += 1
        self._written = 0

    def write(self, line: Mapping[str, Any]) -> None:
        """Write the newest line, again if it is there; nothing is synchronized."""
        text = json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()})
        data = text.ljust(max(self._WIDTH, self._written) - 1).encode() + b"\n"
        os.pwrite(self._file, data, self._at)
        self._written = len(data)

    def next_line(self) -> None:
        """Keep the newest line as it is."""
        self._at, self._written = self._at + self._written, 0

    def close(self) -> None:
        os.close(self._file)
