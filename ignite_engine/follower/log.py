"""What a follower has measured, a line for each checkpoint, in a file that it alone writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ignite_engine.checkpointing.retention import CheckpointInfo
from ignite_engine.run_directory import FOLLOWED_CHECKPOINT, RunDirectory, json_values, lines_of, write_whole

Line = dict[str, Any]


def identity_of(checkpoint: CheckpointInfo) -> dict[str, Any]:
    """Which checkpoint it is, among all that a folder has held."""
    manifest = checkpoint.manifest
    return {"name": checkpoint.path.name, "created_at": manifest.created_at, "run_id": manifest.run_id}


class FollowedLog:
    """The file; each line is added by replacing it whole, so that no reader or kill meets half of one."""

    def __init__(self, run: RunDirectory) -> None:
        self.path = run.followed

    def lines(self) -> list[Line]:
        """All lines, by iteration."""
        return [line for line in lines_of(self.path) if _is_usable(line)]

    def add(self, checkpoint: CheckpointInfo, values: Mapping[str, float]) -> None:
        """Add what was measured of a checkpoint.

        Lines of another run in the folder go, and those of iterations that the run has left: it was resumed from an
        earlier checkpoint, and has saved this one after them.
        """
        manifest, identity = checkpoint.manifest, identity_of(checkpoint)

        def stays(line: Line) -> bool:
            other = line[FOLLOWED_CHECKPOINT]
            is_left = line["iteration"] >= manifest.iteration and other["created_at"] < manifest.created_at
            return other["run_id"] == manifest.run_id and not is_left

        line = {"iteration": manifest.iteration, "epoch": manifest.epoch, **values, FOLLOWED_CHECKPOINT: identity}
        lines = [*filter(stays, self.lines()), json_values(line)]
        lines.sort(key=lambda line: int(line["iteration"]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in lines))


def _is_usable(line: Line) -> bool:
    """Whether a follower wrote it, and nobody has edited it since."""
    identity = line.get(FOLLOWED_CHECKPOINT)
    is_known = isinstance(identity, dict) and isinstance(identity.get("created_at"), str) and "run_id" in identity
    return is_known and isinstance(line.get("iteration"), int)
