"""What leaves the repository: the wheel and the sdist, and a user's own training from the wheel, elsewhere."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import ignite_engine
import ignite_engine.handlers

ROOT = Path(__file__).resolve().parent.parent
BUILT_FROM = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "ignite_engine", "handlers")

pytestmark = pytest.mark.nightly

TASK = """
from pathlib import Path

import torch
from ignite.metrics import Accuracy

import ignite_engine
import ignite_engine.handlers
from ignite_engine import Task


def build(options):
    Path("imported_from.txt").write_text(f"{ignite_engine.__file__}\\n{ignite_engine.handlers.__file__}\\n")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(options["samples"], 8, generator=generator)
    labels = (inputs[:, 0] > 0).long()
    data = torch.utils.data.TensorDataset(inputs, labels)
    return Task(
        model=torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)),
        loss_fn=loss,
        train_set=data,
        val_sets={"val": data},
        predict=lambda model, batch: (model(batch[0]), batch[1]),
        metrics={"accuracy": Accuracy()},
    )


def loss(model, batch):
    inputs, labels = batch
    return torch.nn.functional.cross_entropy(model(inputs), labels)
"""

CONFIG = """
task: my_task.py:build
task_options: {samples: 256}
run: {directory: first_run, max_iterations: 40}
data: {batch_size: 16}
optimizer: {name: AdamW, lr: 3.0e-2}
schedule: {name: cosine, warmup: 4}
update: {accumulation_steps: 2, clip_norm: 1.0}
handlers:
  Evaluation: {every: 20}
  Checkpoint: {every: 20}
  MetricLogger: {every: 10}
  ClearML: {}
"""


def run(*command, cwd):
    """The command's standard output; nothing of the caller's Python paths reaches it."""
    unset = {"PYTHONPATH", "PYTHONHOME", "COVERAGE_PROCESS_START"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind, source, target):
    """Builds the "wheel" or "sdist" of ``source`` with the setuptools at hand; its path."""
    target.mkdir(parents=True, exist_ok=True)
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    run(sys.executable, "-c", script, cwd=source)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what a build reads, so that the build leaves nothing behind in the repository."""
    copy = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The bin folder of a new environment that has the wheel, and torch and the rest from the one we run in."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Below the new environment's own packages, and after the install: pip must not take the editable one for the wheel.
    # A .pth inside these folders is not read, so the editable install stays out of reach.
    ours = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "packages_of_the_tests.pth").write_text("\n".join(ours) + "\n")
    return folder / "bin"


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_every_module_and_the_handlers_inside_the_package(wheel):
    core = {path.relative_to(ROOT) for path in (ROOT / "ignite_engine").rglob("*.py")}
    handlers = {Path("ignite_engine") / path.relative_to(ROOT) for path in (ROOT / "handlers").rglob("*.py")}

    report = ROOT / "ignite_engine" / "ext" / "report"
    pages = {path.relative_to(ROOT) for path in (*report.glob("page.*"), *report.glob("*.js"), *report.glob("uplot/*"))}

    assert len(handlers) > 3 and len(pages) == 5
    assert contents(wheel) == {path.as_posix() for path in core | handlers | pages} | {"ignite_engine/py.typed"}


def test_pinned_versions_install_on_the_lowest_python_that_is_promised():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lowest = settings["options"]["python_requires"].removeprefix(">=") + ".0"
    needed = {found.metadata["Name"]: found.metadata["Requires-Python"] or "" for found in distributions()}
    assert [name for name, versions in needed.items() if not SpecifierSet(versions).contains(lowest)] == []


def test_sdist_is_enough_to_build_the_same_wheel(source, wheel, tmp_path):
    sdist = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()

    assert (unpacked / "handlers" / "__init__.py").is_file()
    assert contents(build("wheel", unpacked, tmp_path / "wheel")) == contents(wheel)


def test_installed_wheel_trains_a_users_own_task(environment, tmp_path):
    """Outside the repository: own task file, own config, nothing imported from the sources."""
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "my_config.yaml").write_text(CONFIG)

    run(environment / "python", "-m", "ignite_engine", "train", "my_config.yaml", cwd=tmp_path)

    imported_from = (tmp_path / "imported_from.txt").read_text().split()
    assert [Path(path).is_relative_to(environment.parent) for path in imported_from] == [True, True]
    summary = json.loads((tmp_path / "first_run" / "summary.json").read_text())
    assert (summary["status"], summary["iteration"]) == ("completed", 40)
    lines = [json.loads(line) for line in (tmp_path / "first_run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["iteration"]: line["loss"] for line in lines if "loss" in line}
    assert list(losses) == [10, 20, 30, 40]
    assert losses[40] < losses[10] / 2
    accuracies = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    assert accuracies[-1] > 0.9
    assert any((tmp_path / "first_run" / "checkpoints").iterdir())
    assert "val/accuracy" in (tmp_path / "first_run" / "report.html").read_text()
    assert list((tmp_path / "first_run" / "clearml" / "offline").glob("*.zip"))


def test_console_script_is_the_same_command_line(environment, tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "my_config.yaml").write_text(CONFIG)

    by_script = run(environment / "ignite-engine", "describe", "my_config.yaml", cwd=tmp_path)
    by_module = run(environment / "python", "-m", "ignite_engine", "describe", "my_config.yaml", cwd=tmp_path)

    free_space = re.compile(r"[\d.]+ [MG]iB are")  # others may write to the disk in between
    assert free_space.sub("", by_script) == free_space.sub("", by_module) != ""


def test_examples_and_a_users_program_are_typed_against_the_wheel(environment, tmp_path):
    for path in (*(ROOT / "examples").glob("*.py"), ROOT / "tests" / "typed_program.py"):
        shutil.copy2(path, tmp_path / path.name)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\n[mypy-sklearn.*]\nignore_missing_imports = true\n"
        "[mypy-monai.*]\nignore_missing_imports = true\n"
        "[mypy-transformers.*]\nignore_missing_imports = true\nfollow_imports = skip\n"
    )

    run(sys.executable, "-m", "mypy", "--python-executable", environment / "python", ".", cwd=tmp_path)


def test_public_names_are_completed():
    for module in (ignite_engine, ignite_engine.handlers):
        assert set(module.__all__) <= set(dir(module))
