"""Real runs: commands and programs in processes of their own, their configs, and what they leave in their folder.

None of them imports torch anew, and the ranks that they start are forked, too, where ``spawns`` is not asked for.
"""

import json
import os
import resource
import runpy
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import yaml

from ignite_engine import cli
from ignite_engine.ranks import launch
from tests.kit.fitting import with_handlers
from tests.kit.processes import ROOT, start

CONFIG = {
    "task": f"{Path(__file__).with_name('task.py')}:build",
    "run": {"max_epochs": 6, "seed": 3, "threads": 1},
    "data": {"batch_size": 4, "num_workers": 0},
    "optimizer": {"name": "AdamW", "lr": 0.01},
    "schedule": {"name": "cosine", "warmup": 3},
    "update": {"precision": "bf16", "accumulation_steps": 4, "clip_norm": 1.0},
    "handlers": {
        "Evaluation": {"sanity_batches": 0},  # batches are counted, and where one is broken off
        "Checkpoint": {"every": 5},
        "MetricLogger": {"every": 2, "console": False},
        "Progress": None,
        "Report": None,
    },
}


def write_config(folder, *, base=CONFIG, **sections):
    """A config in ``folder`` whose run directory is ``folder/run``.

    ``sections`` override values of ``base``; those with a capital letter are settings of handlers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: dict(value) if isinstance(value, dict) else value for name, value in base.items()}
    if base is CONFIG:
        sections = {**sections, "task_options": {"directory": str(folder), **sections.get("task_options", {})}}
    entries = {name: values for name, values in sections.items() if name[0].isupper()}
    config["handlers"] = with_handlers(config.get("handlers", {}), entries)
    for name, values in sections.items():
        if isinstance(values, dict) and name not in entries:
            config[name] = {**config.get(name, {}), **values}
        elif name not in entries:
            config[name] = values
    config["run"]["directory"] = str(folder / "run")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(folder, *words, spawns=False, file_limit=None):
    """``ignite-engine WORDS`` in ``folder``, in a session of its own as a terminal starts it: a ``Child``.

    Args:
        file_limit: no file may grow above so many bytes, as on a full disk.
    """
    return _with_outputs(folder, _command, [str(word) for word in words], spawns, file_limit)


def script(folder, path, *words, spawns=False):
    """``python PATH WORDS`` in ``folder``: a ``Child``."""
    return _with_outputs(folder, _script, [str(path), *map(str, words)], spawns)


def program(folder, code, *words, spawns=False):
    """``python -c CODE WORDS``: a ``Child``."""
    path = Path(tempfile.mkdtemp(prefix="program_")) / "program.py"
    path.write_text(code)
    return script(folder, path, *words, spawns=spawns)


def train(config, *words, **options):
    """``train CONFIG WORDS``, with what it prints in ``output.txt`` beside the config: a ``Child``."""
    words = ["train", str(config), *map(str, words)]
    spawns, limit = options.get("spawns", False), options.get("file_limit")
    return start(_command, words, spawns, limit, folder=ROOT, output=config.parent / "output.txt")


def trained(config, *words, code=0, timeout_s=120.0):
    """``train`` to its end, with this exit code."""
    process = train(config, *words)
    assert process.wait(timeout_s) == code, process.said()


def interrupt(process, number=signal.SIGINT):
    """Signal the whole group as a terminal does; the exit code and the seconds until the process was gone."""
    began = time.monotonic()
    process.signal(number)
    return process.wait(60), time.monotonic() - began


def lines(folder):
    """The log of the run in ``folder/run``."""
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def iteration(folder):
    """The last one in the log; 0 before."""
    logged = lines(folder)
    return logged[-1]["iteration"] if logged else 0


def summary(folder):
    return json.loads((folder / "run" / "summary.json").read_text())


def group_is_gone(process, timeout_s=10.0):
    """Nothing that a ``Child`` has started lives, whatever session it is in; multiprocessing's resource tracker goes a
    moment after its parent."""
    deadline, output = time.monotonic() + timeout_s, str(process.output.resolve())
    while time.monotonic() < deadline:
        if not any(_prints_into(output, path) for path in Path("/proc").glob("[0-9]*/fd/1")):
            return True
        time.sleep(0.02)
    return False


def _prints_into(output, descriptor):
    try:
        return os.readlink(descriptor) == output
    except OSError:  # it has ended
        return False


def free_port():
    """A TCP port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _with_outputs(folder, function, *arguments):
    said = Path(tempfile.mkdtemp(prefix="said_"))
    return start(function, *arguments, folder=folder, output=said / "output.txt", errors=said / "errors.txt")


def _fork_ranks(spawns):
    if not spawns:
        launch.START_METHOD = "fork"


def _command(words, spawns, file_limit):
    _fork_ranks(spawns)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    sys.exit(cli.main(words))


def _script(words, spawns):
    _fork_ranks(spawns)
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
