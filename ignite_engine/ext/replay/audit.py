"""Segments of a run between checkpoints, drawn at random, trained again and compared."""

from __future__ import annotations

import random
import secrets
import shutil
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import ReplayError
from ignite_engine.ext.replay.compare import Difference, compare
from ignite_engine.ext.replay.rerun import Build, rerun
from ignite_engine.ranks import agreement
from ignite_engine.runs.run_directory import RunDirectory


@dataclass(frozen=True)
class Segment:
    """The iterations after ``first``, to the checkpoint at ``last``."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"iterations {self.first + 1} to {self.last}"


@dataclass
class Audit:
    """What was trained again, and what was found.

    Attributes:
        drawn: segments that were trained again.
        segments: all of the run.
        seed: draws the same ones again.
        found: what differs first, by segment.
    """

    drawn: list[Segment]
    segments: list[Segment]
    seed: int
    found: dict[Segment, Difference] = field(default_factory=dict)

    @property
    def missed(self) -> float:
        """The probability with which one forged segment is not among those that were drawn."""
        return 1 - len(self.drawn) / len(self.segments)

    def lines(self) -> list[str]:
        """For people."""
        covered = sum(segment.last - segment.first for segment in self.drawn)
        share = f"{covered} of {self.segments[-1].last} iterations"
        lines = [f"Replayed {len(self.drawn)} of {len(self.segments)} segments, {share}, drawn with seed {self.seed}."]
        lines += [f"  {segment}: {self.found.get(segment, 'as saved and logged')}" for segment in self.drawn]
        if not self.found:
            lines.append(
                f"Nothing differs. One forged segment would have been missed with probability {self.missed:.2f}."
            )
        return lines


def audit(run: str | Path, build: Build | None = None, *, segments: int, seed: int | None = None) -> Audit:
    """Train segments of a run again; compare its log, its trail and the checkpoint at the end of each. A collective.

    Args:
        run, build: as of :func:`~ignite_engine.ext.replay.rerun`.
        segments: how many are drawn; at most all.
        seed: of the draw. None: one that nobody could know when the run was made.

    Raises:
        ReplayError: one line; the run cannot be replayed, or has no checkpoint.
    """
    if segments < 1:
        raise ReplayError(f"segments: got {segments}, expected at least 1.")
    directory = Path(run)
    known, chosen = agreement.on_rank_0(
        lambda: (segments_of(directory), secrets.randbits(32) if seed is None else seed)
    )
    drawn = random.Random(chosen).sample(known, min(segments, len(known)))
    result = Audit(sorted(drawn, key=lambda segment: segment.first), known, chosen)
    for segment in result.drawn:
        folder = rerun(directory, segment.last, since=segment.first, build=build)
        compared = agreement.on_rank_0(partial(compare, directory, folder, segment.last, since=segment.first))
        shutil.rmtree(folder, ignore_errors=True)
        if compared.difference is not None:
            result.found[segment] = compared.difference
    return result


def segments_of(directory: Path) -> list[Segment]:
    """The segments of a run, in order; what a later start has trained again is left out.

    Raises:
        ReplayError: it has no checkpoint.
    """
    ends = [0]
    for checkpoint in CheckpointStore(RunDirectory(directory).checkpoints).checkpoints():
        ends = [*(end for end in ends if end < checkpoint.iteration), checkpoint.iteration]
    if ends == [0]:
        raise ReplayError(f"{directory} has no checkpoint, at which a segment could end.")
    return [Segment(first, last) for first, last in pairwise(ends)]
