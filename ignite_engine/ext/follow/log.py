"""What a follower has measured of a run's checkpoints: a line for each, in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.runs.run_directory import FOLLOWED_CHECKPOINT, write_whole
from ignite_engine.text import json_values, lines_of


def identity_of(checkpoint: CheckpointInfo) -> dict[str, Any]:
    """Which checkpoint it is, among all that a folder has held."""
    manifest = checkpoint.manifest
    return {"name": checkpoint.path.name, "created_at": manifest.created_at, "run_id": manifest.run_id}


class FollowedLog:
    """The file; it is replaced whole, so that no reader or kill meets half of a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        """All lines, by iteration."""
        return [line for line in lines_of(self.path) if _is_usable(line)]

    def add(self, checkpoint: CheckpointInfo, values: Mapping[str, float]) -> None:
        """Add what was measured of a checkpoint.

        Lines of another run in the folder go, and those of iterations that the run has left: it was resumed from an
        earlier checkpoint, and has saved this one after them.
        """
        manifest, identity = checkpoint.manifest, identity_of(checkpoint)
        line = {"iteration": manifest.iteration, "epoch": manifest.epoch, **values, FOLLOWED_CHECKPOINT: identity}
        stays = [
            other
            for other in self.lines()
            if other[FOLLOWED_CHECKPOINT]["run_id"] == manifest.run_id
            and (
                other["iteration"] < manifest.iteration
                or other[FOLLOWED_CHECKPOINT]["created_at"] > manifest.created_at
            )
        ]
        lines = sorted([*stays, json_values(line)], key=lambda each: int(each["iteration"]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, "".join(json.dumps(each) + "\n" for each in lines))


def _is_usable(line: dict[str, Any]) -> bool:
    """Whether a follower wrote it."""
    identity = line.get(FOLLOWED_CHECKPOINT)
    return isinstance(identity, dict) and identity.keys() >= {"name", "created_at", "run_id"}
