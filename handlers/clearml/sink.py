"""Reports a run's metrics, config and outcome to ClearML; by default offline, in the run's folder."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import ignite.distributed as idist
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.checkpointing.environment import environment_values
from ignite_engine.handlers.sinks import GuardedSink, Values, new_numbers

_SCRIPT = Path(__file__).with_name("session.py")
_MOST_BYTES = 64 * 2**20
_ID_WITHIN_S = 10.0
_STOP_WITHIN_S = 0.5
# With these ClearML treats its process as a worker of the training, or waits for rank 0.
_NOT_FOR_THE_SESSION = ("CLEARML_PROC_MASTER_ID", "TRAINS_PROC_MASTER_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE")
logger = logging.getLogger(__name__)


def server_is_configured() -> bool:
    """Whether a ClearML server is configured, in its file or in environment variables."""
    if os.environ.get("CLEARML_OFFLINE_MODE", "0").lower() not in ("", "0", "false"):
        return False
    file = Path(os.environ.get("CLEARML_CONFIG_FILE", "~/clearml.conf")).expanduser()
    return file.is_file() or any(os.environ.get(name) for name in ("CLEARML_API_HOST", "CLEARML_API_ACCESS_KEY"))


class ClearMLLogger:
    """A sink that reports metrics, config, environment, the newest checkpoint and the outcome to a ClearML task.

    Args:
        directory: of the run. Offline, the session is in ``clearml/offline/<task id>`` below it, and after the run as a
            zip file beside it; ``clearml.Task.import_offline_session`` reads either.
        project: of ClearML.
        task: the task's name; None: that of the directory.
        config: reported as the task's hyperparameters and as a configuration object.
        tags: of the task.
        offline: None: online if a server is configured, by ``clearml.conf`` or ``CLEARML_`` variables.
        close_within_s: how long the end of a run waits at most until everything is written or sent; usually well
            under a second. One that is stopped (Ctrl-C) waits for 0.5 s in all; ClearML's process then ends by itself.
        name: in checkpoints, which hold the task's id: a resumed run continues its task and reports no point twice.

    ClearML runs in a separate process (``session.py``), which the run starts and ends. A report is a line written to a
    pipe; signal handlers, exit hooks, forks and torch.save of the training process are not touched. Values that are not
    finite become a line in the task's log. Rank 0 only.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        project: str = "ignite_engine",
        task: str | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        offline: bool | None = None,
        close_within_s: float = 10.0,
        name: str = "clearml",
    ) -> None:
        self.directory, self.name = Path(directory).absolute(), name
        self.project, self.task, self.config, self.tags = project, task, config, list(tags)
        self.offline, self.close_within_s = offline, close_within_s
        self.task_id: str | None = None
        """ClearML's id of the task; None until it is known."""
        self._run: str | None = None
        """Made by a fresh run; the session files the task's id under it, for checkpoints saved before it is known."""
        self._written: dict[str, int] = {}
        self._session: _Session | None = None
        self._trainer: Trainer | None = None
        self._left_s = _STOP_WITHIN_S
        """What a run that is stopped may still wait."""

    def attach(self, trainer: Trainer) -> None:
        """Report what is new at each METRICS_READY, from STARTED until the run ends for any reason."""
        guarded = GuardedSink(self)
        guarded.attach(trainer)
        start, register, end = guarded.guard(self._start), guarded.guard(self._register), guarded.guard(self._end)

        def start_session(trainer: Trainer) -> None:
            start(trainer)
            trainer.call_at_end(end)

        if idist.get_rank() == 0:
            trainer.add_event_handler(Events.STARTED, start_session)
            trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, register)

    def write(self, iteration: int, values: Values) -> None:
        """Report the numbers among ``values``; rank 0 only.

        Raises:
            RuntimeError: ClearML's process has ended; the message has the reason.
        """
        if self._session is None:
            return
        new = {
            name: number if math.isfinite(number) else str(number)
            for name, number in new_numbers(iteration, values, self._written).items()
        }
        if new:
            self._session.send({"iteration": iteration, "values": new})
            self._written |= dict.fromkeys(new, iteration)

    def state_dict(self) -> dict[str, Any]:
        """The task's id, what finds it if it is not known yet, and the last reported iteration of each series."""
        # where a run starts Checkpoint only asks whether this can be saved
        starts = self._trainer is not None and self._trainer.last_event_name == Events.STARTED
        with self._limited(0 if starts else _ID_WITHIN_S) as within_s:
            self._read_id(within_s)
        return {"task_id": self.task_id, "run": self._run, "written": dict(self._written)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the saved task when the run starts."""
        self.task_id, self._written = state["task_id"], dict(state["written"])
        self._run = state.get("run")

    @contextlib.contextmanager
    def _limited(self, within_s: float) -> Iterator[float]:
        """How long to wait at most."""
        state = None if self._trainer is None else self._trainer.state
        if state is None or not (state.stopping or state.status == "interrupted"):
            yield within_s
            return
        began = time.monotonic()
        yield min(within_s, self._left_s)
        self._left_s = max(self._left_s - (time.monotonic() - began), 0.0)

    def begin_anew(self) -> None:
        """A run starts over, with a task of its own."""
        self.task_id, self._run, self._written = None, None, {}

    def _start(self, trainer: Trainer) -> None:
        self._trainer, self._left_s = trainer, _STOP_WITHIN_S
        self._run = self._run or uuid.uuid4().hex
        folder = self.directory.absolute() / "clearml"
        folder.mkdir(parents=True, exist_ok=True)
        offline = not server_is_configured() if self.offline is None else self.offline
        settings = {
            "offline": offline,
            "folder": str(folder),
            "project": self.project,
            "task": self.task or self.directory.absolute().name,
            "tags": self.tags,
            "config": self.config,
            "environment": environment_values(idist.get_world_size()),
            "command": sys.argv,
            "task_id": self.task_id,
            "run": self._run,
            "written": self._written,
        }
        self._session = _Session(folder / "session.log", settings)
        if self.task_id:
            logger.info("ClearML continues task %s.", self.task_id)

    def _register(self, trainer: Trainer) -> None:
        path = trainer.state.checkpoint_path
        if self._session is not None and path is not None:
            self._session.send({"model": {"path": str(path.absolute()), "iteration": trainer.state.iteration}})

    def _end(self, trainer: Trainer) -> None:
        if self._session is not None:
            try:
                with self._limited(self.close_within_s) as within_s:
                    self._session.end(trainer.state.status, trainer.state.reason, within_s)
            finally:
                self._read_id(0)
                self._session = None

    def _read_id(self, within_s: float) -> None:
        if self._session is not None:
            known = self._session.task_id(within_s, lambda: getattr(self._trainer, "stop_requested", False))
            self.task_id = known or self.task_id


class _Session:
    """The training's side of the process that runs ``session.py``; only methods with a time limit block."""

    def __init__(self, log: Path, settings: Mapping[str, Any]) -> None:
        self.log = log
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_THE_SESSION}
        with log.open("ab") as messages:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT)],  # -P: modules beside the script must not shadow packages
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                env=environment,
                start_new_session=True,  # Ctrl-C must reach the training only
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._from = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._unsent, self._received = bytearray(), bytearray()
        self._id: str | None = None
        self._error: str | None = None
        self._waited = False
        self._silent = False
        """It has closed its output."""
        self.send(settings)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a message to the pipe, or keep it until there is room.

        Raises:
            RuntimeError: the process has ended, or no longer reads.
        """
        if len(self._unsent) > _MOST_BYTES:
            raise RuntimeError(f"ClearML's process no longer reads; see {self.log}")
        self._unsent += json.dumps(message).encode() + b"\n"
        self._push()

    def task_id(self, within_s: float, stopping: Callable[[], bool] = lambda: False) -> str | None:
        """The task's id; None if it is not known within ``within_s``, for which only the first call waits.

        Args:
            stopping: the run has been asked to stop: it waits for 0.5 s from then on.
        """
        until = time.monotonic() + (0 if self._waited else within_s)
        self._waited = self._waited or within_s > 0
        while self._id is None and self._error is None:
            now = time.monotonic()
            if stopping():
                until = min(until, now + _STOP_WITHIN_S)
            if not self._receive(min(until, now + 0.2)) and (self._silent or time.monotonic() >= until):
                break
        return self._id

    def end(self, status: str, reason: str | None, within_s: float) -> None:
        """Report how the run ended and wait for the process to exit.

        Raises:
            RuntimeError: it failed, or is still running after ``within_s``.
        """
        until = time.monotonic() + within_s
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(RuntimeError):  # raised below, with its last error
            self.send({"status": status, "reason": reason})
            while self._unsent and self._takes_more(max(until - time.monotonic(), 0)):
                self._push()
        self.process.stdin.close()
        while self._receive(until):
            pass
        try:
            code = self.process.wait(max(until - time.monotonic(), 0.05))
        except subprocess.TimeoutExpired:
            if status == "interrupted":
                logger.info("ClearML's process still writes, and ends by itself.")
                return
            raise RuntimeError(
                f"ClearML's process still sends after {within_s:g} s and continues in the background; see {self.log}"
            ) from None
        finally:
            self.process.stdout.close()
        if code or self._error:
            raise self._failure()

    def _takes_more(self, within_s: float) -> bool:
        poll = select.poll()  # select.select() takes no descriptor from 1024 on
        poll.register(self._to, select.POLLOUT)
        return bool(poll.poll(1000 * within_s))

    def _push(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._to, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()
            raise self._failure() from None

    def _failure(self) -> RuntimeError:
        while self._error is None and self._receive(time.monotonic() + 1):
            pass
        return RuntimeError(f"ClearML's process has ended: {self._error or 'it reported no error'}; see {self.log}")

    def _receive(self, until: float) -> bool:
        """Read what the process has answered; False if nothing came in time, or its output has ended."""
        if self.process.stdout is None or self.process.stdout.closed:
            return False
        if not wait([self._from], max(until - time.monotonic(), 0)):
            return False
        piece = os.read(self._from, 65536)
        self._received += piece
        self._silent = not piece
        while (line_end := self._received.find(b"\n")) >= 0:
            answer = json.loads(self._received[:line_end])
            del self._received[: line_end + 1]
            self._id, self._error = answer.get("task_id", self._id), self._error or answer.get("error")
        return bool(piece)
