"""What all trackers have in common, and how training starts and ends the process that serves them."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil

if TYPE_CHECKING:
    from ignite.engine import Engine

    from ignite_engine import Trainer

FOLDER, RUN, DONE, LOG = "trackers", "run.json", "done.json", "track.log"
END_WITHIN_S, STOP_WITHIN_S = 30.0, 0.5
_OF_RANKS = ("CLEARML_PROC_MASTER_ID", "TRAINS_PROC_MASTER_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables with which a library would take the process for a rank of the training."""
Row = Mapping[str, Any]
logger = logging.getLogger(__name__)


class Tracker:
    """A handler that sends what is logged to a service: the base class of ours and of yours.

    In training it only names itself in the run's folder, and the first of a run starts one process for all. There it is
    made again, from the arguments of its ``__init__``, which are attributes of the same names; then ``begin``, ``push``
    and ``end`` are called. If they raise, they are called again later, and the end of the run reports it. Training
    waits for nothing.

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

        if self.extra is not None and not _is_installed(self.extra):
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
            if start(self, agreement.world_size()):
                trainer.call_at_end(lambda trainer: _end(trainer, self.directory))
        except OSError as error:
            logger.warning("%s gets nothing: %s. Training continues.", self.name, error)

    _start.phase = 5  # type: ignore[attr-defined]  # Phase.LAST, whose import is torch's: the summary is written by then


def start(tracker: Tracker, world_size: int) -> bool:
    """Name a tracker in the run's folder and start the process, unless another tracker of this run has; else True."""
    from ignite_engine.checkpoint.environment import environment_values
    from ignite_engine.text import json_values

    folder = tracker.directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    kind = type(tracker)
    settings = {name: getattr(tracker, name) for name in inspect.signature(kind).parameters if name != "directory"}
    run = read(folder / RUN)
    is_first = run.get("status") != "running" or run.get("writer") != identity()
    if is_first:
        run = {
            "token": uuid.uuid4().hex,
            "writer": identity(),
            "status": "running",
            "reason": None,
            "command": sys.argv,
            "environment": environment_values(world_size),
            "path": [os.path.abspath(each) for each in sys.path],
            "trackers": {},
        }
    run["trackers"][tracker.name] = {
        "class": [inspect.getfile(kind), kind.__module__, kind.__qualname__],
        "settings": json_values(settings),
    }
    write(folder / RUN, run)
    if is_first:
        environment = {key: value for key, value in os.environ.items() if key not in _OF_RANKS}
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.following", str(tracker.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C must reach the training only
            )
        write(folder / RUN, {**run, "follower": identity(process.pid)})
        process.returncode = 0  # it may outlive this process, and that is no resource that was forgotten
    return is_first


def _end(trainer: Trainer, directory: Path) -> None:
    if read(directory / "summary.json").get("status") != "running":  # else the Run has more to write
        end_of_run(directory, trainer.state.status, trainer.state.reason)


def end_of_run(directory: Path, status: str, reason: str | None) -> None:
    """Tell the process how the run has ended, and wait for it: 30 s at most, 0.5 s where the run was not completed."""
    folder = directory / FOLDER
    run = read(folder / RUN)
    if run.get("writer") != identity() or run.get("status") != "running":
        return
    try:
        write(folder / RUN, {**run, "status": status, "reason": reason})
    except OSError as error:
        logger.warning("The trackers are not told how the run has ended: %s.", error)
        return
    until = time.monotonic() + (END_WITHIN_S if status == "completed" else STOP_WITHIN_S)
    while True:
        has_ended = not is_running(run.get("follower"))  # before its last word is read
        done = read(folder / DONE)
        if has_ended or done.get("token") == run["token"]:
            break
        if time.monotonic() >= until:
            level = logging.WARNING if status == "completed" else logging.INFO
            logger.log(level, "Trackers are still sent to, by a process that ends by itself; see %s.", folder / LOG)
            return
        time.sleep(0.02)
    is_known = done.get("token") == run["token"]
    if problems := done["problems"] if is_known else {"all": f"the process has ended, see {folder / LOG}"}:
        logger.warning(
            "Trackers lack a part of the run (%s). Once that is mended, python -m ignite_engine track %s sends it.",
            "; ".join(f"{name}: {problem}" for name, problem in problems.items()),
            directory,
        )


def numbers(row: Row) -> dict[str, float]:
    """The numbers of a line of the log by name, also those that are not finite; lists and words are left out."""
    found = {}
    for name, value in row.items():
        if name != "iteration" and not isinstance(value, bool) and (isinstance(value, int | float) or value in _WORDS):
            found[name] = float(value)
    return found


_WORDS = ("nan", "inf", "-inf")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | float | str]:
    """A config as hyperparameters: the value of each dotted key that is set, lists as text."""
    values: dict[str, bool | float | str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            values[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return values


def read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(values, default=str), encoding="utf-8")
    os.replace(part, path)


def identity(pid: int | None = None) -> list[Any]:
    """What tells a process, by default this one, from a later one with its number; empty: it has ended."""
    try:
        process = psutil.Process(pid)
        return [process.pid, process.create_time(), platform.node()]
    except psutil.NoSuchProcess:
        return []


def is_running(process: Sequence[Any] | None) -> bool:
    """Whether the process of an :func:`identity` runs; one of another machine does, for all that is known here."""
    if process and process[2] != platform.node():
        return True
    if not process or identity(process[0]) != list(process):
        return False
    try:
        return bool(psutil.Process(process[0]).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_installed(package: str) -> bool:
    return sys.modules.get(package, ...) is not None and importlib.util.find_spec(package) is not None
