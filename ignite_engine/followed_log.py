"""What a follower has measured of a run's checkpoints: a line for each, in the run's folder and in its mirror."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing.retention import CheckpointInfo
from ignite_engine.run_directory import (
    FOLLOWED_CHECKPOINT,
    RunDirectory,
    json_values,
    lines_of,
    objects_in,
    write_whole,
)

Line = dict[str, Any]


def identity_of(checkpoint: CheckpointInfo) -> dict[str, Any]:
    """Which checkpoint it is, among all that a folder has held."""
    manifest = checkpoint.manifest
    return {"name": checkpoint.path.name, "created_at": manifest.created_at, "run_id": manifest.run_id}


def values_of(line: Line) -> dict[str, float]:
    """What was measured, by name."""
    return {name: float(line[name]) for name in line.keys() - {"iteration", "epoch", FOLLOWED_CHECKPOINT}}


def missing_values(checkpoint: CheckpointInfo, lines: Iterable[Line]) -> dict[str, float]:
    """What was measured of a checkpoint and is not in its manifest."""
    identity = identity_of(checkpoint)
    measured = [values_of(line) for line in lines if line[FOLLOWED_CHECKPOINT] == identity]
    known = checkpoint.manifest.metrics
    return {name: value for values in measured for name, value in values.items() if name not in known}


class FollowedLog:
    """The file; it is replaced whole, so that no reader or kill meets half of a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def beside(cls, checkpoints: Path) -> FollowedLog:
        """The log of the run whose checkpoints are in a folder."""
        run = checkpoints.parent if checkpoints.name == RunDirectory(checkpoints).checkpoints.name else checkpoints
        return cls(RunDirectory(run).followed)

    def lines(self) -> list[Line]:
        """All lines, by iteration."""
        return [line for line in lines_of(self.path) if _is_usable(line)]

    def checkpoints(self) -> list[dict[str, Any]]:
        """Of each line what :func:`identity_of` says of its checkpoint."""
        return [line[FOLLOWED_CHECKPOINT] for line in self.lines()]

    def text(self) -> bytes:
        """The text of the file; empty if there is none."""
        return _text_of(self.lines())

    def add(
        self, checkpoint: CheckpointInfo, values: Mapping[str, float], current: Iterable[CheckpointInfo] = ()
    ) -> None:
        """Add what was measured of a checkpoint.

        Lines of another run in the folder go, and those of iterations that the run has left: it was resumed from an
        earlier checkpoint, and has saved this one after them.

        Args:
            current: checkpoints whose lines stay, whatever the clocks said of the machines that have saved them.
        """
        manifest, identity = checkpoint.manifest, identity_of(checkpoint)
        line = {"iteration": manifest.iteration, "epoch": manifest.epoch, **values, FOLLOWED_CHECKPOINT: identity}
        self.join([json_values(line)], manifest.run_id, current)

    def join(self, others: Iterable[Line], run_id: str | None, current: Iterable[CheckpointInfo] = ()) -> None:
        """Take the lines of another copy of the file, and keep those that only this one has; lines of other runs go."""
        others = [line for line in others if line[FOLLOWED_CHECKPOINT]["run_id"] == run_id]
        known, staying = set(map(_key, others)), [identity_of(checkpoint) for checkpoint in current]
        mine = [
            line
            for line in self.lines()
            if line[FOLLOWED_CHECKPOINT]["run_id"] == run_id
            and _key(line) not in known
            and (line[FOLLOWED_CHECKPOINT] in staying or not any(_is_left(line, other) for other in others))
        ]
        lines = sorted((*mine, *others), key=lambda line: int(line["iteration"]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, _text_of(lines).decode())


def lines_in(text: bytes) -> list[Line]:
    """The usable lines of a copy of the file."""
    return [line for line in objects_in(text.decode(errors="replace").splitlines()) if _is_usable(line)]


def _text_of(lines: Iterable[Line]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _is_usable(line: Line) -> bool:
    """Whether a follower wrote it, and nobody has edited it since."""
    identity = line.get(FOLLOWED_CHECKPOINT)
    if not isinstance(identity, dict) or not isinstance(line.get("iteration"), int):
        return False
    try:
        values_of(line)
    except (TypeError, ValueError, OverflowError):
        return False
    return isinstance(identity.get("created_at"), str) and "run_id" in identity


def _key(line: Line) -> tuple[Any, ...]:
    identity = line[FOLLOWED_CHECKPOINT]
    return identity["run_id"], identity["created_at"], line["iteration"]


def _is_left(line: Line, later: Line) -> bool:
    """Whether the run was resumed before an iteration, as it has saved an earlier one after it."""
    saved, since = line[FOLLOWED_CHECKPOINT]["created_at"], later[FOLLOWED_CHECKPOINT]["created_at"]
    return bool(line["iteration"] >= later["iteration"] and saved < since)
