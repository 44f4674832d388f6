"""Whether a run is what its folder says: segments between its checkpoints are trained again."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing import CheckpointInfo, CheckpointStore
from ignite_engine.checkpointing.digests import digests
from ignite_engine.checkpointing.nested import rebuilt
from ignite_engine.errors import CheckpointError, ReplayError, shortened
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.ext.replay.logged import Kept
from ignite_engine.ext.replay.moment import bring_to
from ignite_engine.ext.replay.rebuild import Build
from ignite_engine.ranks import agreement
from ignite_engine.run_directory import RunDirectory
from ignite_engine.trainer import Trainer


@dataclass(frozen=True)
class Segment:
    """The iterations after ``first``, where a checkpoint was saved or the run has started, to those of a checkpoint."""

    first: int
    last: int
    checkpoint: Path
    """The checkpoint at its end."""

    def __str__(self) -> str:
        return f"iterations {self.first + 1} to {self.last}"


@dataclass
class Audit:
    """What was replayed, and what was found.

    Attributes:
        drawn: segments that were replayed.
        segments: of the run.
        found: for each segment that is not what was saved and logged, what differs first.
        seed: draws the same segments again.
    """

    drawn: list[Segment]
    segments: list[Segment]
    seed: int
    found: dict[Segment, str] = field(default_factory=dict)

    @property
    def missed(self) -> float:
        """The probability with which the draw misses one forged segment."""
        return 1 - len(self.drawn) / len(self.segments)

    def lines(self) -> list[str]:
        """For people."""
        covered, whole = (sum(part.last - part.first for part in parts) for parts in (self.drawn, self.segments))
        share = f"{covered:,} of {whole:,} iterations ({100 * covered / whole:.0f} %)"
        lines = [f"Replayed {len(self.drawn)} of {len(self.segments)} segments, {share}, drawn with seed {self.seed}."]
        lines += [f"  {segment}: {self.found.get(segment, 'as saved and logged')}" for segment in self.drawn]
        if not self.found:
            lines.append(
                f"Nothing differs. One forged segment would have been missed with probability {self.missed:.2f}."
            )
        return lines


def audit(run_directory: str | Path, build: Build | None = None, *, segments: int, seed: int | None = None) -> Audit:
    """Replay segments of a run, and compare what it has logged and the checkpoint at the end of each; a collective.

    Args:
        run_directory, build: as of :func:`~ignite_engine.ext.replay.replay`.
        segments: how many are drawn; at most all.
        seed: of the draw. None: one that nobody could know when the run was made.

    Raises:
        ReplayError: one line; the run cannot be replayed, or has no checkpoint.
    """
    if segments < 1:
        raise ReplayError(f"segments: got {segments}, expected at least 1.")
    known = agreement.on_rank_0(lambda: segments_of(Path(run_directory)))
    chosen = agreement.on_rank_0(lambda: secrets.randbits(32) if seed is None else seed)
    drawn = random.Random(chosen).sample(known, min(segments, len(known)))
    result = Audit(sorted(drawn, key=lambda segment: segment.first), known, chosen)
    for segment in result.drawn:
        if problem := _first_difference(Path(run_directory), build, segment):
            result.found[segment] = problem
    return result


def segments_of(directory: Path) -> list[Segment]:
    """The segments of a run, in order; what a later start has trained again is left out.

    Raises:
        ReplayError: it has no checkpoint.
    """
    line: list[CheckpointInfo] = []
    for checkpoint in CheckpointStore(RunDirectory(directory).checkpoints).checkpoints():
        while line and line[-1].iteration >= checkpoint.iteration:
            line.pop()
        line.append(checkpoint)
    if not line:
        raise ReplayError(f"{directory} has no checkpoint, at which a segment could end.")
    firsts = [0, *(checkpoint.iteration for checkpoint in line)]
    return [
        Segment(first, checkpoint.iteration, checkpoint.path)
        for first, checkpoint in zip(firsts, line)
        if checkpoint.iteration > first
    ]


def _first_difference(directory: Path, build: Build | None, segment: Segment) -> str | None:
    """What differs first, as the same sentence on all ranks; None: nothing."""
    try:
        saved = agreement.together(lambda: _saved(segment.checkpoint))
    except CheckpointError as error:
        return str(error)
    end = _DigestsAtEnd(segment.last)
    options: dict[str, Any] = {"before": segment.first + 1, "on_save": end.save, "attach": [end.attach]}
    with bring_to(directory, build, at=segment.last, **options) as moment:
        began = 0 if moment.began_at is None else int(moment.began_at.name.split("_")[1].split(".")[0])
        if moment.difference is not None:
            return str(moment.difference)
        if began != segment.first:
            return f"the checkpoint of iteration {segment.first} is damaged, so nothing could begin there"
    mine = [
        f"{name}.{piece}".rstrip(".")
        for name, pieces in end.parts.items()
        for piece, text in pieces.items()
        if saved.get(name, {}).get(piece) != text
    ]
    names = list(dict.fromkeys(name for rank in agreement.gather_objects(mine) for name in rank))
    weights = [name for name in names if name.startswith("model.")]
    if not names:
        return None
    return f"the replayed state is not that of {segment.checkpoint.name}: {shortened(weights or names)}"


class _DigestsAtEnd:
    """Digests of each part at the end of a segment, as a save there holds them."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.parts: dict[str, dict[str, str]] = {}

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self._at_boundary)

    def save(self, trainer: Trainer, shared: Mapping[str, Any], local: Mapping[str, Any]) -> None:
        if trainer.state.iteration == self.iteration:
            objects, parts = trainer.registry.objects, {**shared, **local}
            self.parts = {
                name: digests(rebuilt(state, _whole))
                for name, state in parts.items()
                if not isinstance(objects.get(name), Kept)
            }

    def _at_boundary(self, trainer: Trainer) -> None:
        if trainer.state.iteration == self.iteration and not self.parts:
            # a clock, a signal or a stop has asked for the save, so how many there were is not known
            self.save(trainer, *trainer.registry.capture())
            self.parts["trainer"].pop("checkpoints")

    _at_boundary.phase = Phase.LAST  # type: ignore[attr-defined]


def _whole(leaf: Any) -> Any:
    """A sharded tensor whole, as a checkpoint is read, which is a collective; what else there is as it is."""
    return leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf


def _saved(checkpoint: Path) -> dict[str, Mapping[str, str]]:
    """Digests of what a checkpoint holds of the shared parts and of this rank's."""
    store = CheckpointStore(checkpoint.parent)
    if problems := store.verify(checkpoint):
        raise CheckpointError(f"{checkpoint.name} is damaged: {'; '.join(problems).rstrip('.')}")
    loaded = store.load(checkpoint, agreement.rank())
    return {name: digests(state) for name, state in {**loaded.shared, **loaded.local}.items()}
