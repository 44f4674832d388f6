"""When a run was started, stopped and resumed, for its report."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ignite.engine import Events

from ignite_engine import Phase, Trainer
from ignite_engine.ranks import agreement, attempt
from ignite_engine.state import Start
from ignite_engine.text import json_values


class History:
    """Adds a line to ``starts.jsonl`` in the run's folder at each start, and one when it has ended in any way.

    A kill leaves none of the latter. That the folder cannot be written is said by the log beside it.
    """

    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None) -> None:
        self.path = Path(directory).absolute() / "starts.jsonl"  # the run may change its working directory
        self.config = config
        """The settings of the run, in the line of each start."""

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.STARTED, self._start)

    def _start(self, trainer: Trainer) -> None:
        trainer.registry.check_all_claimed()  # by then nothing refuses the start any more
        config = {} if self.config is None else {"config": self.config}
        what = "started" if trainer.state.start is Start.FRESH else "resumed"
        self._add(trainer, what, attempt.current.reason, **config)
        trainer.call_at_end(self._end)

    _start.phase = Phase.LAST  # type: ignore[attr-defined]  # read by the Trainer

    def _end(self, trainer: Trainer) -> None:
        self._add(trainer, trainer.state.status, trainer.state.reason)

    def _add(self, trainer: Trainer, what: str, reason: str | None, **more: Any) -> None:
        if agreement.rank() != 0:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        values = {"what": what, "iteration": trainer.state.iteration, "reason": reason, "at": now, **more}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(json_values(values), default=str) + "\n")
