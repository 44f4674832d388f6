"""Each claim of docs/trust.md, watched from outside: an audit hook in every process of a run, its children included."""

import ast
import configparser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from ignite_engine import load_model
from ignite_engine.checkpointing import CheckpointError, CheckpointStore
from ignite_engine.checkpointing.environment import _VARIABLES
from ignite_engine.task import TaskError
from tests.checkpointing.states import save
from tests.test_packaging import BUILT_FROM, build

pytestmark = pytest.mark.slow  # a run that is watched by an audit hook

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")

HOOK = """
import os, sys

watched = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
NAMES = {"socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "pickle.find_class",
         "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.mkdir", "os.rename", "os.remove",
         "os.symlink", "os.link", "open", "shutil.rmtree"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def watch(event, arguments, write=os.write):
    if event not in NAMES:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITES):
        return
    arguments = arguments[:1] if event == "open" else arguments
    paths = [value for value in arguments if isinstance(value, (str, bytes, os.PathLike))]
    said = [os.path.abspath(os.fsdecode(path)) if event.startswith(("o", "sh")) else repr(path) for path in paths]
    write(watched, repr((event, said)).encode() + b"\\n")

sys.addaudithook(watch)
"""

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


SECRET = "hunter2-is-no-secret-of-anybody"


class Watched:
    """A folder in which commands run, and what their processes did."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("hook", "home", "temporary"):
            (folder / name).mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        (folder / "my_task.py").write_text(TASK)
        (folder / "config.yaml").write_text(CONFIG)

    def run(self, *words):
        """The events of a command of Python and of its children."""
        log = self.folder / "audit.txt"
        log.unlink(missing_ok=True)
        places = {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "temporary"), "AUDIT_LOG": str(log)}
        places["HF_TOKEN"] = SECRET
        paths = os.pathsep.join([str(self.folder / "hook"), str(ROOT)])
        environment = {**os.environ, **places, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        unwanted = ("CLEARML", "TORCHINDUCTOR")  # torch sets the latter in this process
        environment = {name: value for name, value in environment.items() if not name.startswith(unwanted)}
        done = subprocess.run(
            [sys.executable, *words], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        events = [ast.literal_eval(line) for line in log.read_text().splitlines()]
        return events


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("watched"))


READERS = [
    ["evaluate", "config.yaml"],
    ["report", "run"],
    ["compare", "run", "run"],
    ["checkpoints", "verify", "run"],
    ["checkpoints", "list", "run"],
    ["checkpoints", "export", "run", "-o", "weights.safetensors"],
]


@pytest.fixture(scope="module")
def events_of_a_run(watched):
    """Of a run with the defaults, its resume, and all that reads it."""
    engine = ("-m", "ignite_engine")
    found = watched.run(*engine, "train", "config.yaml")
    assert ("open", [str(watched.folder / "run" / "metrics.jsonl")]) in found, "the hook sees what is written"
    found += watched.run(*engine, "train", "config.yaml", "run.max_iterations=16")
    return found + watched.run(
        "-c", f"from ignite_engine.cli import main\nfor line in {READERS}: assert not main(line)"
    )


def named(events, *prefixes):
    return [event for event in events if event[0].startswith(prefixes)]


def test_the_hook_sees_a_connection_and_a_pickle(watched):
    """Of Python itself; else the tests below could not fail."""
    program = "import pickle, socket, pathlib; pickle.loads(pickle.dumps(pathlib.PurePosixPath('x')))\n"
    program += "try: socket.create_connection(('127.0.0.1', 9), timeout=1)\nexcept OSError: pass\n"
    names = {name for name, _ in watched.run("-c", program)}
    assert {"pickle.find_class", "socket.connect", "socket.getaddrinfo"} <= names


def test_importing_it_connects_starts_and_writes_nothing(watched):
    theirs = "import torch, ignite.engine, ignite.metrics, numpy, yaml, psutil, pydantic"
    ours = "ignite_engine, ignite_engine.handlers, ignite_engine.ext.report, ignite_engine.runs.fit"
    without = watched.run("-c", theirs)
    events = watched.run("-c", f"{theirs}, {ours}")
    temporary = str(watched.folder / "temporary")
    assert [event for event in events if event not in without and temporary not in str(event)] == []


def test_no_connection_is_opened_by_default(events_of_a_run):
    assert named(events_of_a_run, "socket.") == []


def test_nothing_is_unpickled(events_of_a_run):
    assert named(events_of_a_run, "pickle.") == []


def test_programs_that_are_started_are_named_on_the_page(events_of_a_run):
    started = {Path(ast.literal_eval(said[0])).name for _, said in named(events_of_a_run, "subprocess.Popen")}
    others = named(events_of_a_run, "os.system", "os.exec", "os.posix_spawn")
    assert started == {"git", Path(sys.executable).name} and others == []
    assert "`git`" in PAGE and "ClearML's session" in PAGE


def test_what_is_written_is_in_the_runs_folder_and_named_on_the_page(watched, events_of_a_run):
    run, temporary = watched.folder / "run", watched.folder / "temporary"
    asked_for = {watched.folder / name for name in ("compare.html", "weights.safetensors")}
    changed = {Path(path) for event in named(events_of_a_run, "open", "os.", "shutil") for path in event[1]}
    elsewhere = {
        path
        for path in changed
        if not path.is_relative_to(run)
        and not path.is_relative_to(temporary)
        and not any(path.parent == file.parent and file.name in path.name for file in asked_for)
        and path not in (Path("/dev/null"), run.parent)
    }
    assert elsewhere == set() and list((watched.folder / "home").iterdir()) == []

    top = {path.name for path in run.iterdir()}
    rows = set(re.findall(r"^\| `([\w.]+)/?`", PAGE, flags=re.MULTILINE))
    assert {"metrics.jsonl", "checkpoints", "summary.json", "clearml"} <= top and top - {".lock"} <= rows


def test_no_variable_of_the_environment_is_written_that_the_page_does_not_name(watched, events_of_a_run):
    files = [path for path in (watched.folder / "run").rglob("*") if path.is_file()]
    assert len(files) > 10 and [path for path in files if SECRET.encode() in path.read_bytes()] == []
    recorded = json.loads((watched.folder / "run" / "environment.json").read_text())["variables"]
    assert set(recorded) <= set(_VARIABLES) and len(_VARIABLES) == 5 and "the five variables" in PAGE


def test_dependencies_are_named_on_the_page():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    needed = re.findall(r"^([\w-]+)", settings["options"]["install_requires"], flags=re.MULTILINE)
    sentence = re.search(r"^## What it depends on\n(.+?);", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert sentence is not None
    assert set(needed) == set(re.findall(r"[\w-]+", sentence[1].replace(" and ", " ")))


def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'witness'}",)

    store = CheckpointStore(tmp_path / "checkpoints")
    path = save(store, 1)
    torch.save({"model": Payload()}, path / "shared.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    content = (path / "shared.pt").read_bytes()
    manifest["files"]["shared.pt"] = {
        "bytes": len(content),
        "hash": f"sha256:{hashlib.sha256(content).hexdigest()}",
    }
    (path / "manifest.json").write_text(json.dumps(manifest))

    with pytest.raises(CheckpointError):
        store.load(path, 0)
    assert not (tmp_path / "witness").exists()
    torch.load(path / "shared.pt", weights_only=False)  # as it would be elsewhere
    assert (tmp_path / "witness").exists()


def test_the_task_that_a_checkpoint_names_is_imported_only_if_asked_for(watched, events_of_a_run, monkeypatch):
    witness = watched.folder / "witness"
    (watched.folder / "my_task.py").write_text(f"open({str(witness)!r}, 'w').close()\n" + TASK)
    monkeypatch.chdir(watched.folder)
    with pytest.raises(TaskError):
        load_model("run")
    assert not witness.exists()
    load_model("run", import_task=True)
    assert witness.exists()


def test_constraints_pin_one_version_of_each_package_and_no_hash():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 90 and [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert "pins versions, not hashes" in PAGE


@pytest.mark.packaging
def test_wheel_is_text_alone_and_the_same_when_it_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    wheels = []
    for name in ("first", "second"):
        source = tmp_path / name
        source.mkdir()
        for part in BUILT_FROM:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            options = (
                {"symlinks": True, "ignore": shutil.ignore_patterns("__pycache__")} if (ROOT / part).is_dir() else {}
            )
            copy(ROOT / part, source / part, **options)
        wheels.append(build("wheel", source, tmp_path / f"{name}_wheel"))
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = wheel.namelist()
        for name in names:
            wheel.read(name).decode("utf-8")
    kinds = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert kinds <= {".py", ".js", ".css", ".typed", ""} and not any(name.endswith(".pth") for name in names)
