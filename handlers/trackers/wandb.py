"""Weights & Biases: a run that is continued, online where there is a key."""

from __future__ import annotations

import contextlib
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ignite_engine.handlers.trackers.tracker import Row, Tracker, numbers


class WandB(Tracker):
    """Sends what is logged to Weights & Biases; needs ``ignite-engine[wandb]``.

    Args:
        directory: of the run; W&B writes into its ``wandb`` folder.
        project: of W&B.
        run_name: None: that of the directory.
        config: of the run.
        offline: None: online where ``WANDB_API_KEY`` or ``~/.netrc`` has a key, unless ``WANDB_MODE`` says otherwise.
        name: of its files in ``directory/trackers``; they hold the run's id: a resumed run continues its W&B run.

    W&B takes no step again: after a roll-back it gets what is later than all that it has. Offline each start writes a
    folder, under the same id, for ``wandb sync``. ``wandb.run`` is in the tracker's process only.
    """

    extra, takes_again = "wandb", False

    def __init__(
        self,
        directory: str | Path,
        *,
        project: str = "ignite_engine",
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        offline: bool | None = None,
        name: str = "wandb",
    ) -> None:
        super().__init__(directory, name=name)
        self.project, self.run_name, self.config, self.offline = project, run_name, config, offline
        self._run: Any = None

    def begin(self, first: int, kept: dict[str, Any], run: Mapping[str, Any]) -> None:
        import wandb

        if self._run is not None:
            if kept.get("id") == self._run.id:
                return
            self._run.finish()
        offline = not _has_key() if self.offline is None else self.offline
        self._run = wandb.init(
            project=self.project,
            name=self.run_name or self.directory.name,
            id=kept.get("id"),
            resume="allow" if kept.get("id") and not offline else None,
            dir=str(self.directory),
            config=dict(self.config or {}),
            mode="offline" if offline else None,
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )
        kept["id"] = self._run.id

    def push(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row["iteration"] >= self._run.starting_step:
                self._run.log(numbers(row), step=row["iteration"])

    def end(self, outcome: Mapping[str, Any]) -> None:
        self._run.summary.update({"status": outcome["status"], "reason": outcome["reason"]})
        self._run.finish(exit_code=int(outcome["status"] == "failed"))


def _has_key() -> bool:
    """Whether W&B can be reached without asking for a key."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode == "online"
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(host) is not None
    return False
