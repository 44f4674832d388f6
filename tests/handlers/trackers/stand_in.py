"""A stand-in for the library clearml, which ClearML's process imports: it keeps all calls in a file.

Written as ``clearml`` into a folder of PYTHONPATH. While the folder has a file ``wait`` no task begins; with one
``fail``, none can. Offline it writes the points where the library does.
"""

import json
import os
import time
from pathlib import Path

FOLDER = Path(__file__).parents[1]
OFFLINE = "CLEARML_OFFLINE_MODE" in os.environ


def record(call, *given, **named):
    with (FOLDER / "calls.jsonl").open("a") as file:
        file.write(json.dumps({"call": call, "given": given, **named}, default=str) + "\n")


class Recorded:
    def __getattr__(self, name):
        return lambda *given, **named: record(name, *given, **named)


class Logger(Recorded):
    def __init__(self, task):
        self.path = Path(os.environ["CLEARML_CACHE_DIR"], "offline", task, "metrics.jsonl") if OFFLINE else None

    def report_scalar(self, title, series, value, iteration):
        path = self.path or FOLDER / "server.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps([{"metric": title, "variant": series, "iter": iteration, "value": value}]) + "\n")


class Task(Recorded):
    @classmethod
    def init(cls, **given):
        while (FOLDER / "wait").exists():
            time.sleep(0.01)
        if (FOLDER / "fail").exists():
            raise ValueError("wrong key")
        task = cls()
        task.id = given["continue_last_task"] or f"{'offline-' if OFFLINE else ''}{time.time_ns()}"
        record("init", **given, id=task.id, pid=os.getpid())
        return task

    def get_logger(self):
        return Logger(self.id)

    def get_last_iteration(self):
        lines = map(json.loads, (FOLDER / "server.jsonl").read_text().splitlines())
        return max(event["iter"] for events in lines for event in events)


class OutputModel(Recorded):
    def __init__(self, task, name, framework):
        self._base = type("Base", (), {})()

    def _get_base_model(self):
        return self._base


class SessionCache: ...
