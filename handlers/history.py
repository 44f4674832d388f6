"""When a run was started, stopped and resumed, for its report."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ignite.engine import Events

from ignite_engine import Phase, Trainer
from ignite_engine.ranks import agreement, attempt
from ignite_engine.run_directory import RunDirectory
from ignite_engine.state import Start


class History:
    """Adds a line to ``starts.jsonl`` in the run's folder at each start, and one when it has ended in any way.

    A kill leaves none of the latter. That the folder cannot be written is said by the log beside it.
    """

    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None) -> None:
        self.directory = RunDirectory(directory)
        self.config = config
        """The settings of the run, in the line of each start."""

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.STARTED, self._start)

    def _start(self, trainer: Trainer) -> None:
        trainer.registry.check_all_claimed()  # by then nothing refuses the start any more
        self._note("started" if trainer.state.start is Start.FRESH else "resumed", trainer, self.config)
        trainer.call_at_end(self._end)

    _start.phase = Phase.LAST  # type: ignore[attr-defined]  # read by the Trainer

    def _end(self, trainer: Trainer) -> None:
        self._note(trainer.state.status, trainer)

    def _note(self, what: str, trainer: Trainer, config: Mapping[str, Any] | None = None) -> None:
        if agreement.rank() == 0:
            reason = attempt.current.reason if config is not None else trainer.state.reason
            with contextlib.suppress(OSError):
                self.directory.note(what, trainer.state.iteration, reason, config)
