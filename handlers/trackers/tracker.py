"""What all trackers have in common, and how training starts and ends the processes that serve them."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ignite_engine.text import flat, from_json, json_values, read_object

if TYPE_CHECKING:
    from ignite.engine import Engine

    from ignite_engine import Trainer

FOLDER, START = "trackers", ".start.json"
END_WITHIN_S, STOP_WITHIN_S = 30.0, 0.5
_OF_RANKS = ("CLEARML_PROC_MASTER_ID", "TRAINS_PROC_MASTER_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables with which a library would take the process for a rank of the training."""
Row = Mapping[str, Any]
logger = logging.getLogger(__name__)
_sending: dict[Path, dict[str, subprocess.Popen[bytes]]] = {}
"""By the run's directory and the tracker's name, the processes that this one has started for a run that goes on."""


class Tracker:
    """A handler that sends what is logged to a service: the base class of ours and of yours.

    In training it only names itself in the run's folder, and starts a process. There it is made again, from the
    arguments of its ``__init__``, which are attributes of the same names; then ``begin``, ``push`` and ``end`` are
    called. If they raise, they are called again later, and the end of the run reports it. Training waits for nothing.

    Args:
        directory: of the run, which has the ``metrics.jsonl`` of a MetricLogger.
        name: of its files in ``directory/trackers``.
    """

    extra: ClassVar[str | None] = None
    """The package that it needs and the extra of the same name that installs it."""
    takes_again: ClassVar[bool] = True
    """Whether it can drop points, for others at the same iterations."""

    def __init__(self, directory: str | Path, *, name: str) -> None:
        self.directory, self.name = Path(directory).absolute(), name

    def attach(self, engine: Engine) -> None:
        """Have everything that is logged sent, from STARTED until the run ends for any reason.

        Raises:
            ValueError: its package is not installed, or its class is in a script, which cannot be imported.
        """
        from ignite.engine import Events

        from ignite_engine import Trainer

        # None: its import is blocked
        if self.extra and (sys.modules.get(self.extra, ...) is None or not importlib.util.find_spec(self.extra)):
            raise ValueError(
                f"{type(self).__name__} needs the package {self.extra}: pip install 'ignite-engine[{self.extra}]'."
            )
        if type(self).__module__ == "__main__":
            raise ValueError(
                f"{type(self).__name__} is defined in the script that runs; another process sends what is logged: "
                "define it in a module."
            )
        Trainer.of(engine).add_event_handler(Events.STARTED, self._start)

    def begin(self, first: int, kept: dict[str, Any], run: Mapping[str, Any]) -> None:
        """Open the tracker's own record of the run, or continue it.

        Args:
            first: the iteration from which rows follow; what it holds from there on is out of date.
            kept: what was put here before, such as an id; it is kept in the run's folder.
            run: ``command`` and ``environment`` of the run, among others.
        """

    def push(self, rows: Sequence[Row]) -> None:
        """Send lines of the log, in order: ``iteration``, ``epoch`` and values by name."""
        raise NotImplementedError(f"{type(self).__name__}.push(rows) is missing.")

    def end(self, outcome: Mapping[str, Any]) -> None:
        """The run has ended with the ``status`` and for the ``reason`` in ``outcome``, and all rows were pushed."""

    def _start(self, trainer: Trainer) -> None:
        from ignite_engine.ranks import agreement

        if agreement.rank() != 0:
            return
        try:
            if self.name not in _sending.get(self.directory, {}):  # else the run has gone back to a checkpoint
                _start_process(self, agreement.world_size())
        except OSError as error:
            logger.warning("%s gets nothing: %s. Training continues.", self.name, error)
        else:
            trainer.call_at_end(self._end)

    _start.phase = 5  # type: ignore[attr-defined]  # Phase.LAST, whose import is torch's: the summary is written by then

    def _end(self, trainer: Trainer) -> None:
        # that of a Run has more to write, and one that goes back to a checkpoint goes on
        if "running" not in (trainer.state.status, read_object(self.directory / "summary.json").get("status")):
            end_of_run(self.directory, trainer.state.status, trainer.state.reason)


def _start_process(tracker: Tracker, world_size: int) -> None:
    """Write into the run's folder what the process makes the tracker of, and start it."""
    from ignite_engine.checkpoint.environment import environment_values

    folder, kind = tracker.directory / FOLDER, type(tracker)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(tracker, name) for name in inspect.signature(kind).parameters if name != "directory"}
    start = {
        "class": [inspect.getfile(kind), kind.__module__, kind.__qualname__],
        "settings": json_values(settings),
        "path": [os.path.abspath(each) for each in sys.path],
        "command": sys.argv,
        "environment": environment_values(world_size),
        "outcome": None,
    }
    write_object(folder / f"{tracker.name}{START}", start)
    with (folder / f"{tracker.name}.log").open("ab") as log:
        _sending.setdefault(tracker.directory, {})[tracker.name] = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.following", tracker.directory, tracker.name, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={key: value for key, value in os.environ.items() if key not in _OF_RANKS},
            start_new_session=True,  # Ctrl-C must reach the training only
        )


def end_of_run(directory: Path, status: str, reason: str | None) -> None:
    """Tell the processes how the run has ended, and wait: 30 s at most, 0.5 s where the run was not completed."""
    sending, folder, problems = _sending.pop(directory, {}), directory / FOLDER, []
    try:
        for name in sending:
            start = folder / f"{name}{START}"
            write_object(start, {**read_object(start), "outcome": {"status": status, "reason": reason}})
    except OSError as error:
        logger.warning("The trackers are not told how the run has ended: %s.", error)
    until = time.monotonic() + (END_WITHIN_S if status == "completed" else STOP_WITHIN_S)
    for name, process in sending.items():
        try:
            if process.wait(max(until - time.monotonic(), 0.0)):
                problem = read_object(folder / f"{name}.json").get("problem")
                problems.append(f"{name}: {problem or f'its process has failed, see {name}.log'}")
        except subprocess.TimeoutExpired:
            level = logging.WARNING if status == "completed" else logging.INFO
            logger.log(level, "%s is still sent to, by a process that ends by itself; see %s.", name, folder)
            process.returncode = 0  # it may outlive this process, and that is no resource that was forgotten
    if problems:
        logger.warning(
            "Trackers lack a part of the run (%s). Once that is mended, python -m ignite_engine track %s sends it.",
            *("; ".join(problems), directory),
        )


def numbers(row: Row) -> dict[str, float]:
    """The numbers of a line of the log by name, also those that are not finite; lists and words are left out."""
    values = {name: from_json(value) for name, value in row.items() if name != "iteration"}
    return {name: float(value) for name, value in values.items() if type(value) in (int, float)}


def hyperparameters(config: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """The value of each dotted key of a config that is set, lists as text."""
    values = {key: value for key, value in flat(config).items() if value is not None}
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values.items()}


def write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(values, default=str), encoding="utf-8")
    os.replace(part, path)
