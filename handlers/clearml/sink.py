"""What a run measures, was configured with and ended as, in ClearML; offline, in the run's folder, by default."""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ignite.distributed as idist
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.checkpointing.environment import environment_values
from ignite_engine.handlers.sinks import Outlet, Values, number_of

_SCRIPT = Path(__file__).with_name("session.py")
_MOST_BYTES = 64 * 2**20
_ID_WITHIN_S = 10.0
# ClearML would take this process for a worker of the training, or wait for a rank 0 that it knows.
_NOT_FOR_THE_SESSION = ("CLEARML_PROC_MASTER_ID", "TRAINS_PROC_MASTER_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE")
logger = logging.getLogger(__name__)


def server_is_configured() -> bool:
    """Whether the user has told ClearML about a server, in its file or in its environment variables."""
    if os.environ.get("CLEARML_OFFLINE_MODE", "0").lower() not in ("", "0", "false"):
        return False
    file = Path(os.environ.get("CLEARML_CONFIG_FILE", "~/clearml.conf")).expanduser()
    return file.is_file() or any(os.environ.get(name) for name in ("CLEARML_API_HOST", "CLEARML_API_ACCESS_KEY"))


class ClearMLLogger:
    """A sink that is a ClearML task: metrics, config, environment, the newest checkpoint, and how the run ended.

    Args:
        directory: of the run. Offline, the session lies in ``clearml/offline/<task id>`` below it, with a zip of it
            beside when the run has ended; ``clearml.Task.import_offline_session`` takes either.
        project: of ClearML.
        task: the task's name; None: the directory's.
        config: becomes the task's hyperparameters and a configuration object.
        tags: of the task.
        offline: None: online where the user has configured a server, by ``clearml.conf`` or ``CLEARML_`` variables.
        close_within_s: how long the end of a run waits, at most, until all has been written or sent; usually well
            under a second.
        name: in checkpoints, which hold the task's id: a resumed run goes on with its task, and reports no point twice.

    ClearML runs in a process of its own (``session.py``), which the run starts and ends. To report is to write
    a line into a pipe; signals, exit hooks, forks and torch.save of the training stay as they are. Values that are no
    finite numbers become a line in the task's log. Rank 0 only.
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
        self.directory, self.name = Path(directory), name
        self.project, self.task, self.config, self.tags = project, task, config, list(tags)
        self.offline, self.close_within_s = offline, close_within_s
        self.task_id: str | None = None
        """ClearML's id of the task; None until there is one."""
        self._written: dict[str, int] = {}
        self._session: _Session | None = None

    def attach(self, trainer: Trainer) -> None:
        """Report what is new at each METRICS_READY, from STARTED to the end of the run in whatever way."""
        outlet = Outlet(self)
        outlet.attach(trainer)
        start, register, end = outlet.guarded(self._start), outlet.guarded(self._register), outlet.guarded(self._end)

        def start_and_see_to_the_end(trainer: Trainer) -> None:
            start(trainer)
            trainer.call_at_end(end)

        if idist.get_rank() == 0:
            trainer.add_event_handler(Events.STARTED, start_and_see_to_the_end)
            trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, register)

    def write(self, iteration: int, values: Values) -> None:
        """Report the numbers among ``values``; rank 0 only.

        Raises:
            RuntimeError: ClearML's process has ended; the message says why.
        """
        if self._session is None:
            return
        new = {
            name: number if math.isfinite(number) else str(number)
            for name, number in ((name, number_of(value)) for name, value in values.items())
            if number is not None and iteration > self._written.get(name, -1)
        }
        if new:
            self._session.send({"iteration": iteration, "values": new})
            self._written |= dict.fromkeys(new, iteration)

    def state_dict(self) -> dict[str, Any]:
        """The task, and the last iteration of each of its series."""
        self._learn_id(_ID_WITHIN_S)
        return {"task_id": self.task_id, "written": dict(self._written)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the saved task when the run starts."""
        self.task_id, self._written = state["task_id"], dict(state["written"])

    def _start(self, trainer: Trainer) -> None:
        if trainer.state.iteration == 0:
            self.task_id, self._written = None, {}
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
            "written": self._written,
        }
        self._session = _Session(folder / "session.log", settings)
        if self.task_id:
            logger.info("ClearML goes on with task %s.", self.task_id)

    def _register(self, trainer: Trainer) -> None:
        path = trainer.state.checkpoint_path
        if self._session is not None and path is not None:
            self._session.send({"model": {"path": str(path.absolute()), "iteration": trainer.state.iteration}})

    def _end(self, trainer: Trainer) -> None:
        if self._session is not None:
            try:
                self._session.end(trainer.state.status, trainer.state.reason, self.close_within_s)
            finally:
                self._learn_id(0)
                self._session = None

    def _learn_id(self, within_s: float) -> None:
        if self._session is not None:
            self.task_id = self._session.task_id(within_s) or self.task_id


class _Session:
    """Our end of the process that runs ``session.py``; nothing here waits but where a limit is given."""

    def __init__(self, log: Path, settings: Mapping[str, Any]) -> None:
        self.log = log
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_THE_SESSION}
        with log.open("ab") as messages:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT)],  # -P: the handlers beside it must shadow no package
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the training
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._from = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._waiting, self._heard = bytearray(), bytearray()
        self._id: str | None = None
        self._error: str | None = None
        self._waited = False
        self.send(settings)

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand a message over, or keep it until there is room in the pipe.

        Raises:
            RuntimeError: the process has ended, or takes nothing any more.
        """
        if len(self._waiting) > _MOST_BYTES:
            raise RuntimeError(f"ClearML's process takes nothing any more; {self.log} may say why")
        self._waiting += json.dumps(message).encode() + b"\n"
        self._push()

    def task_id(self, within_s: float) -> str | None:
        """The task's id; None if it is not known within ``within_s``, which is waited for once only."""
        until = time.monotonic() + (0 if self._waited else within_s)
        self._waited = self._waited or within_s > 0
        while self._id is None and self._error is None and self._listen(until):
            pass
        return self._id

    def end(self, status: str, reason: str | None, within_s: float) -> None:
        """Say how the run ended and wait for the process, which otherwise ends by itself.

        Raises:
            RuntimeError: it failed, or is not ready within ``within_s``.
        """
        until = time.monotonic() + within_s
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(RuntimeError):  # told below, by what it said last
            self.send({"status": status, "reason": reason})
            while self._waiting and select.select([], [self._to], [], max(until - time.monotonic(), 0))[1]:
                self._push()
        self.process.stdin.close()
        while self._listen(until):
            pass
        try:
            code = self.process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"ClearML's process is not ready after {within_s:g} s; it goes on alone, {self.log} says how far it is"
            ) from None
        finally:
            self.process.stdout.close()
        if code or self._error:
            raise self._failure()

    def _push(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._to, self._waiting)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._waiting.clear()
            raise self._failure() from None

    def _failure(self) -> RuntimeError:
        while self._error is None and self._listen(time.monotonic() + 1):
            pass
        return RuntimeError(f"ClearML's process has ended: {self._error or 'it did not say why'}; see {self.log}")

    def _listen(self, until: float) -> bool:
        """Take in one piece of what the process says; False: nothing came in time, or it has said all."""
        if self.process.stdout is None or self.process.stdout.closed:
            return False
        if not select.select([self._from], [], [], max(until - time.monotonic(), 0))[0]:
            return False
        piece = os.read(self._from, 65536)
        self._heard += piece
        while (line_end := self._heard.find(b"\n")) >= 0:
            answer = json.loads(self._heard[:line_end])
            del self._heard[: line_end + 1]
            self._id, self._error = answer.get("task_id", self._id), self._error or answer.get("error")
        return bool(piece)
