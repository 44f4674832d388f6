"""What docs/guarantees.md says of the user's machine, watched from outside: an audit hook in a process of a run."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ignite_engine import cli
from tests.kit.fitting import read
from tests.kit.processes import child
from tests.test_packaging import BUILT_FROM, build

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
SECRET = "hunter2-is-no-secret-of-anybody"
TASK = """
import torch
from ignite_engine import Task

def build(options):
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(32, 2) / 64)
    loss = lambda model, batch: (model(batch[0]) - 1).square().mean()
    return Task(model=torch.nn.Linear(2, 1), loss_fn=loss, train_set=data, val_sets={"val": data})
"""
CONFIG = """
task: my_task.py:build
run: {directory: run, max_iterations: 12}
data: {batch_size: 4}
"""
COMMANDS = [
    ["train", "config.yaml"],
    ["train", "config.yaml", "run.max_iterations=16"],
    ["evaluate", "config.yaml"],
    ["report", "run"],
    ["compare", "run", "run"],
    ["checkpoints", "verify", "run"],
    ["checkpoints", "list", "run"],
    ["checkpoints", "export", "run", "-o", "weights.safetensors"],
]
WATCHED = ("socket.", "pickle.find_class", "subprocess.Popen", "os.", "shutil.rmtree", "open")
LOOKS = ("os.listdir", "os.scandir", "os.walk", "os.putenv", "os.unsetenv")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def events_of(work):
    """What Python is told of while ``work()`` runs, but for files that are read: ``(event, paths or words)``."""
    events = []

    def watch(event, arguments):
        if not event.startswith(WATCHED) or event in LOOKS:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITES):
            return
        arguments = arguments[: 1 if event == "open" else 2]
        paths = [value for value in arguments if isinstance(value, (str, bytes, os.PathLike))]
        events.append((event, [os.path.abspath(os.fsdecode(path)) for path in paths]))

    sys.addaudithook(watch)
    work()
    return list(events)


def run_all(folder):
    os.environ.update(HOME=str(folder / "home"), TMPDIR=str(folder / "temporary"), HF_TOKEN=SECRET)
    for name in [name for name in os.environ if name.startswith("CLEARML")]:
        del os.environ[name]
    os.chdir(folder)
    for words in COMMANDS:
        assert cli.main(words) == 0, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    for name in ("home", "temporary"):
        (folder / name).mkdir()
    (folder / "my_task.py").write_text(TASK)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def events(folder):
    """Of a run with the defaults, its resume, and all that reads it."""
    found = child(lambda: events_of(lambda: run_all(folder)))
    assert ("open", [str(folder / "run" / "metrics.jsonl")]) in found, "the hook sees what is written"
    return found


def named(events, *prefixes):
    return [event for event in events if event[0].startswith(prefixes)]


def test_the_hook_sees_a_connection_and_a_pickle():
    """Else the tests below could not fail."""

    def work():
        import pickle
        import socket

        pickle.loads(pickle.dumps(Path("x")))
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", 9), timeout=1)

    assert {"pickle.find_class", "socket.connect"} <= {name for name, _ in child(lambda: events_of(work))}


def test_no_connection_is_opened_by_default(events):
    assert named(events, "socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname") == []


def test_nothing_is_unpickled(events):
    assert named(events, "pickle.") == []


def test_programs_that_are_started_are_named_on_the_page(events):
    started = {Path(said[0]).name for _, said in named(events, "subprocess.Popen")}
    assert started <= {"git", Path(sys.executable).name} and "`git`" in PAGE and "for trackers" in PAGE
    assert named(events, "os.system", "os.exec", "os.posix_spawn") == []


def test_what_is_written_is_in_the_runs_folder_and_named_on_the_page(folder, events):
    run = folder / "run"
    asked_for = {folder / name for name in ("compare.html", "weights.safetensors")}
    changed = {Path(path) for event in named(events, "open", "os.mkdir", "os.rename", "os.remove") for path in event[1]}
    elsewhere = {
        path
        for path in changed
        if not (path.is_relative_to(run) or path.is_relative_to(folder / "temporary"))
        and not any(path.parent == file.parent and file.name in path.name for file in asked_for)
        and "__pycache__" not in path.parts
        and path not in (Path("/dev/null"), folder)
    }
    assert elsewhere == set() and list((folder / "home").iterdir()) == []
    top = {path.name for path in run.iterdir()}
    rows = set(re.findall(r"^\| `([\w.]+)/?`", PAGE, flags=re.MULTILINE))
    assert {"metrics.jsonl", "checkpoints", "summary.json"} <= top and top - {".lock"} <= rows


def test_no_variable_of_the_environment_is_written_that_the_page_does_not_name(folder, events):
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    assert len(files) > 10 and [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert len(read(folder / "run", "environment")["variables"]) <= 5 and "the five variables" in PAGE


def test_dependencies_are_named_on_the_page():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    needed = re.findall(r"^([\w-]+)", settings["options"]["install_requires"], flags=re.MULTILINE)
    sentence = re.search(r"^### What it depends on\n(.+?);", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert set(needed) == set(re.findall(r"[\w-]+", sentence[1].replace(" and ", " ")))


def test_constraints_pin_one_version_of_each_package_and_no_hash():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 90 and [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert "pins versions, not hashes" in PAGE


@pytest.mark.nightly
def test_importing_it_connects_starts_and_writes_nothing(tmp_path):
    hook = "import sys; seen = []; sys.addaudithook(lambda *event: seen.append(event[0])); "
    theirs = "import torch, ignite.engine, ignite.metrics, numpy, yaml, psutil; "
    ours = "seen.clear(); import ignite_engine, ignite_engine.handlers; from ignite_engine import fit; print(set(seen))"
    command = [sys.executable, "-B", "-c", theirs + hook + ours]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert not re.findall(r"socket\.connect|subprocess|os\.(mkdir|rename|remove|system)", done.stdout)


@pytest.mark.nightly
def test_the_wheel_is_text_alone_and_the_same_when_it_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    wheels = []
    for name in ("first", "second"):
        source = tmp_path / name
        source.mkdir()
        for part in BUILT_FROM:
            if (ROOT / part).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / part, source / part)
        wheels.append(build("wheel", source, tmp_path / f"{name}_wheel"))
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = wheel.namelist()
        for name in names:
            wheel.read(name).decode("utf-8")
    kinds = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert kinds <= {".py", ".js", ".css", ".typed", ""} and not any(name.endswith(".pth") for name in names)
