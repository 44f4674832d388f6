"""The process that reports to ClearML: a script that the sink beside it starts; nothing imports it.

ClearML changes its process: signal handlers, patched functions, threads, hooks on fork and exit. Here that does not
reach the training process. The script reads one JSON object per line from standard input until it ends, and answers on
standard output with ``{"task_id": ...}`` once the task exists, or with ``{"error": ...}``.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearml import OutputModel

FRAMEWORKS = (
    "matplotlib", "tensorflow", "tensorboard", "pytorch", "xgboost", "scikit", "fastai", "lightgbm", "hydra",
    "tfdefines", "joblib", "megengine", "catboost", "gradio", "jsonargparse",
)  # fmt: skip
START_WITHIN_S, END_WITHIN_S = 60, 600
KILLED = "the training process ended without reporting a status; it was probably killed"


class Session:
    """One ClearML task.

    Args:
        settings: of the sink beside it: ``offline``, ``folder``, ``project``, ``task``, ``tags``, ``config``,
            ``environment``, ``command`` (``sys.argv`` of the training), ``task_id`` (of the task to
            continue, or None), ``run`` (names the file with the id, for where that is None) and ``written`` (the last
            reported iteration of each series).
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.offline: bool = settings["offline"]
        folder = Path(settings["folder"])
        # a run that was stopped has not waited for its session to end
        self._lock = (folder / "session.lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        known = folder / f"{settings['run']}.task"
        before: str | None = settings["task_id"] or (known.read_text() if known.exists() else None)
        if self.offline:
            os.environ |= {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": str(folder)}
            if before:
                drop_later_points(folder / "offline" / before / "metrics.jsonl", settings["written"])
        else:
            os.environ.pop("CLEARML_OFFLINE_MODE", None)
        sys.argv = settings["command"]

        from clearml import Logger, Task
        from clearml.backend_interface.task.task import Task as BackendTask
        from clearml.config.cache import SessionCache

        tasks: Any = Task
        reporting: Any = BackendTask
        # with the subprocess a report blocks for seconds and close() takes up to two minutes
        reporting._report_subprocess_enabled = False
        if self.offline:
            SessionCache.SESSION_CACHE_FOLDER = str(folder)  # else a file in the user's home
        continued = before if before and before.startswith("offline-") == self.offline else None
        self.task = tasks.init(
            project_name=settings["project"],
            task_name=settings["task"],
            tags=settings["tags"],
            reuse_last_task_id=False,
            continue_last_task=continued or False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks={**dict.fromkeys(FRAMEWORKS, False), "detect_repository": not self.offline},
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        part = known.with_suffix(".part")
        part.write_text(self.task.id)
        part.replace(known)  # a kill leaves no half of an id
        self.known_until = -1
        """Points up to this iteration are already on the server."""
        if self.task.id == continued:
            self.task.set_initial_iteration(0)  # our iteration numbers already continue
            if not self.offline:
                self.known_until = self.task.get_last_iteration()
        elif before:
            self.task.set_user_properties(continues=before)
        self.logger: Logger = self.task.get_logger()
        self.model: dict[str, Any] | None = None
        self._output: OutputModel | None = None
        self._connect(settings)

    def _connect(self, settings: Mapping[str, Any]) -> None:
        packages = {package.name: package.version for package in importlib.metadata.distributions()}
        environment = {**settings["environment"], "packages": dict(sorted(packages.items()))}
        self.task.connect_configuration(environment, name="environment")
        if settings["config"]:
            self.task.connect_configuration(settings["config"], name="config")
            self.task.set_parameters_as_dict(settings["config"])
        self.task.set_user_properties(status="running", reason="")

    def take(self, message: Mapping[str, Any]) -> None:
        """Carry out one message: values, a model, or the end."""
        if "values" in message:
            self._report(message["iteration"], message["values"])
        elif "model" in message:
            self.model = message["model"]
            if not self.offline:
                self._register_model()
        else:
            self.end(message["status"], message["reason"] or "")

    def _report(self, iteration: int, values: Mapping[str, Any]) -> None:
        if iteration <= self.known_until:
            return
        for name, value in values.items():
            title, _, series = name.partition("/")
            number = float(value)
            if math.isfinite(number):
                self.logger.report_scalar(title, series or title, number, iteration)
            else:  # ClearML would plot it as 0
                self.logger.report_text(f"iteration {iteration}: {name} is {value}", print_console=False)

    def _register_model(self) -> None:
        """Register the newest checkpoint as the task's output model, by path; its files are not uploaded."""
        from clearml import OutputModel

        if self.model is None:
            return
        if self._output is None:
            self._output = OutputModel(task=self.task, name="checkpoint", framework="PyTorch")
            if self.offline:
                model: Any = self._output._get_base_model()
                model.locked = False  # clearml 2.1.12 reads it without setting it
        uri = Path(self.model["path"]).as_uri()
        self._output.update_weights(register_uri=uri, iteration=self.model["iteration"], update_comment=False)

    def end(self, status: str, reason: str) -> None:
        """Close the task as ``completed``, ``interrupted`` or ``failed``."""
        if self.offline:  # only the newest: on import each one becomes a model
            self._register_model()
        self.task.set_user_properties(status=status, reason=reason)
        self.task.flush(wait_for_uploads=True)
        self.task.close()
        # after close(), which marks the task as completed unless this process raised
        if self.offline:
            return
        if status == "failed":
            self.task.mark_failed(status_reason=reason, force=True)
        elif status != "completed":
            self.task.stopped(status_reason=reason, force=True)


def drop_later_points(path: Path, written: Mapping[str, int]) -> None:
    """Drop the points of an offline session that a resumed run will report again.

    Args:
        path: its ``metrics.jsonl``, with a list of events per line; it may be missing.
        written: the last iteration to keep of each series.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events = json.loads(line)
        except ValueError:  # an incomplete line of a killed process
            continue
        kept.append([entry for entry in events if entry.get("iter", 0) <= written.get(series_of(entry), -1)])
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(events) + "\n" for events in kept if events)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def series_of(event: Mapping[str, Any]) -> str:
    """The name under which the training reported ``event``."""
    title, series = event.get("metric", ""), event.get("variant", "")
    return title if title == series else f"{title}/{series}"


def main() -> int:
    """Serve one training; returns the exit code."""
    ignore_stops()
    os.nice(5)  # the training has priority
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ClearML prints must not mix with the answers
    messages: Iterator[dict[str, Any]] = (json.loads(line) for line in sys.stdin.buffer if line.endswith(b"\n"))
    settings = next(messages, None)
    if settings is None:
        return 0
    failed = False

    def answer(**values: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the training was killed
            print(json.dumps(values), file=answers, flush=True)

    def fail(error: Exception) -> None:
        nonlocal failed
        failed = True
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")

    def time_out(*_: Any) -> None:
        answer(error="TimeoutError: ClearML's server did not answer")
        os._exit(1)

    signal.signal(signal.SIGALRM, time_out)  # ClearML itself retries without end
    signal.alarm(START_WITHIN_S)
    try:
        session = Session(settings)
    except Exception as error:
        fail(error)
        return 1
    signal.alarm(0)
    ignore_stops()  # again: Task.init() installs handlers of its own
    answer(task_id=session.task.id)
    for message in chain(messages, [{"status": "failed", "reason": KILLED}]):
        if "status" in message:
            signal.alarm(END_WITHIN_S)
        try:
            session.take(message)
        except Exception as error:  # the other values can still be reported
            fail(error)
        if "status" in message:
            break
    return int(failed)


def ignore_stops() -> None:
    """Ignore stop signals: the training handles them and then reports how it ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
