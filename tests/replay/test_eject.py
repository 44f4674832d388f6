"""A run as a program in plain PyTorch: the same weights to the bit, and nothing of the engine in it."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ignite_engine import rng
from ignite_engine.cli import main
from ignite_engine.config import ConfigError, load_config
from ignite_engine.replay.eject import eject
from ignite_engine.runs import recipe
from ignite_engine.runs.run import Run
from tests.examples.golden import OPTIONS
from tests.replay import fit_runs

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
QUIET = [f"logging.{name}=false" for name in ("console", "progress", "memory", "throughput", "clearml", "report")]
SHORT = ["run.max_epochs=null", "early_stopping.metric=null", "early_stopping.mode=min", "early_stopping.patience=5"]
LINES = 150

pytestmark = pytest.mark.filterwarnings("ignore::ignite_engine.config.ConfigWarning")


def weights_of_run(config: Path, *overrides: str) -> str:
    with rng.isolated():
        run = recipe.build_run(load_config(config, [*overrides, *QUIET]))
        run.train()
    return str(run.summary["weights_sha256"])


def weights_of_program(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the program prints last."""
    program = folder / "train_plain.py"
    program.write_text(text)
    capsys.readouterr()
    with rng.isolated():
        runpy.run_path(str(program), run_name="__main__")
    return capsys.readouterr().out.splitlines()[-1]


def imported(text: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    return names


def loop_of(text: str) -> list[str]:
    """All lines but those of the task."""
    above, _, below = text.partition("# The task: ")
    return [*above.splitlines(), *below.partition("# The run.")[2].splitlines()]


def test_run_elsewhere_than_its_config_finds_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "tasks").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    config = tmp_path / "project" / "config.yaml"
    shutil.copy(ROOT / "tests/replay/features.py", tmp_path / "project" / "tasks" / "features_elsewhere.py")
    config.write_text("task: tasks/features_elsewhere.py:build\nrun: {max_iterations: 2}\ndata: {batch_size: 4}\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "argv", ["ignite-engine", "train", str(config)])
    weights_of_run(config, "run.directory=run")

    assert "ITERATIONS = 2" in eject(tmp_path / "elsewhere" / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("byte_gpt", ["run.max_iterations=3", "task_options.width=32", "task_options.ngram_slots=256"]),
        ("click_stream", ["run.max_iterations=9", "task_options.samples=2000"]),  # two updates of a window
        ("click_stream", ["task_options.samples=600", "task_options.windows=3"]),  # to its end
        ("digits", ["run.max_iterations=40"]),  # 34 updates of an epoch
        ("nanogpt_cpu", ["run.max_iterations=4", "task_options.n_layer=1"]),
    ],
)
def test_ejected_config_ends_with_the_weights_of_its_run(
    name: str, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = SHORT if name == "digits" else []
    overrides = [
        *end,
        *small,
        *(option for option in OPTIONS[name] if option.split("=")[0] not in f"{small} run.max_epochs"),
    ]
    few = ["evaluation.every=null", "evaluation.at_end=false", "evaluation.sanity_batches=0", "checkpoint.best=null"]
    few += ["evaluation.progressive=false", "evaluation.at_start=false"]
    expected = weights_of_run(CONFIGS / f"{name}.yaml", *overrides, *few, f"run.directory={tmp_path / 'run'}")

    text = eject(CONFIGS / f"{name}.yaml", overrides)

    assert imported(text).isdisjoint({"ignite", "ignite_engine"})
    assert len(loop_of(text)) <= LINES
    assert max(map(len, loop_of(text))) <= 120
    assert weights_of_program(text, tmp_path, capsys) == expected


CASES: dict[str, list[str]] = {
    "weights": ["task_options={weights: some, collate: true}", "update.accumulation_steps=3", "schedule.name=cosine"],
    "bf16": ["update.precision=bf16", "schedule.name=wsd", "schedule.warmup=2", "data.drop_last=true"],
    "workers": ["data.num_workers=2", "update.accumulation_steps=2", "update.clip_norm=0.1"],
    "fp16": ["update.precision=fp16", "update.grad_scaler={init_scale: 16777216.0}", "schedule.name=inverse_sqrt"],
    "losses": ["task_options={losses: true}", "schedule={name: polynomial, min_ratio: 0.1, warmup: 0.2}"],
    "order": ["data.shuffle=false", "optimizer={name: SGD, lr: 0.1, momentum: 0.9}", "schedule.name=linear"],
    "several": [
        "task_options={groups: true}",
        "optimizers={body: {name: SGD, lr: 0.1}, head: {name: Adam, schedule: {name: wsd, decay_shape: 1-sqrt}}}",
        "schedule.name=cosine",
        "update.clip_norm=0.5",
        "update.global_micro_batches=2",
    ],
    "part": ["task_options={body: true}", "update.clip_norm=0.01"],
    "process": ["run.deterministic=true", "run.matmul_precision=medium", "run.seed=7", "ema.decay=0.9"],
}


@pytest.fixture
def as_it_was() -> Any:
    """The settings of the whole process."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@pytest.mark.slow
@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("case", CASES)
def test_ejected_program_does_what_the_settings_say(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"task: {ROOT}/tests/replay/features.py:build\nrun: {{max_epochs: 3}}\ndata: {{batch_size: 4}}\n")
    expected = weights_of_run(config, *CASES[case], f"run.directory={tmp_path / 'run'}")

    text = eject(config, CASES[case])

    if case in ("fp16", "weights"):  # the rates wait for steps that are left out
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert 0 < summary["skipped_steps"] < summary["iteration"] // 2
    assert imported(text).isdisjoint({"ignite", "ignite_engine"})
    assert len(loop_of(text)) <= LINES
    assert weights_of_program(text, tmp_path, capsys) == expected


@pytest.mark.parametrize("build", [fit_runs.of_columns, fit_runs.of_a_loader, fit_runs.of_a_maker])
def test_ejected_run_of_fit_ends_with_its_weights(
    build: Callable[[Path], Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rng.isolated():
        run = build(tmp_path / "run")

    text = eject(tmp_path / "run", build=build)

    assert imported(text).isdisjoint({"ignite", "ignite_engine"})
    assert weights_of_program(text, tmp_path, capsys) == run.summary["weights_sha256"]


def test_ejected_program_prints_the_losses_of_the_log_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rng.isolated():
        run = fit_runs.of_a_maker(tmp_path / "run")
    capsys.readouterr()
    program = tmp_path / "plain.py"
    program.write_text(eject(tmp_path / "run", build=fit_runs.of_a_maker))
    with rng.isolated():
        runpy.run_path(str(program), run_name="__main__")

    lines = capsys.readouterr().out.splitlines()[:-1]
    logged = [(row["iteration"], row["loss"]) for row in run.history if "loss" in row and row["iteration"] % 4 == 0]
    assert lines == [f"iteration {iteration}, loss {loss:.6g}" for iteration, loss in logged] and len(lines) == 2


def test_completed_run_is_ejected_up_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"task: {ROOT}/tests/replay/features.py:build\nrun: {{max_epochs: 9}}\ndata: {{batch_size: 4}}\n")
    stops = ["early_stopping.metric=val/loss", "early_stopping.patience=1", "early_stopping.min_delta=9.0"]
    expected = weights_of_run(config, *stops, f"run.directory={tmp_path / 'run'}")
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())["iteration"]
    assert ended < 90

    with pytest.raises(ConfigError, match=r"early_stopping.metric: got 'val/loss', and an ejected program"):
        eject(config, stops)

    text = eject(tmp_path / "run")

    assert f"ITERATIONS = {ended}" in text
    assert weights_of_program(text, tmp_path, capsys) == expected


@pytest.mark.slow
def test_ejected_program_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"task: {ROOT}/tests/replay/features.py:build\nrun: {{max_iterations: 3}}\n")
    assert main(["eject", str(config), "data.batch_size=4"]) == 0
    program = tmp_path / "plain.py"
    program.write_text(capsys.readouterr().out)
    seen = tmp_path / "seen.py"
    seen.write_text(
        "import runpy, sys\nrunpy.run_path('plain.py', run_name='__main__')\n"
        "assert not {'ignite', 'ignite_engine'} & sys.modules.keys()\n"
    )

    done = subprocess.run([sys.executable, str(seen)], cwd=tmp_path, capture_output=True, text=True, check=True)

    expected = weights_of_run(config, "data.batch_size=4", f"run.directory={tmp_path / 'run'}")
    assert done.stdout.splitlines()[-1] == expected


REFUSED = {
    "distributed.nproc_per_node=2": "distributed.nproc_per_node: got 2",
    "distributed.strategy=fsdp": "distributed.strategy: got 'fsdp'",
    "update.non_finite=skip": "update.non_finite: got 'skip'",
    "update.capture=auto": "update.capture: got 'auto'",
    "data.max_read_errors=3": "data.max_read_errors: got 3",
    "data.exclude=list.txt": "data.exclude: got 'list.txt'",
    "checkpoint.load.path=other.pt": "checkpoint.load: got 'other.pt'",
    "schedule={name: plateau, metric: val/loss}": "schedule.name: got 'plateau'",
    "checkpoint.override={optimizer.lr: 0.1}": "checkpoint.override: got {'optimizer.lr': 0.1}",
}


@pytest.mark.parametrize("override", REFUSED)
def test_setting_that_cannot_be_expressed_is_refused_by_its_key(override: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"task: {ROOT}/tests/replay/features.py:build\nrun: {{max_epochs: 3}}\n")

    with pytest.raises(ConfigError, match=re.escape(REFUSED[override])) as refusal:
        eject(config, [override])

    assert "\n" not in str(refusal.value)


def test_rank_invariant_run_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"task: {ROOT}/tests/replay/features.py:build\nrun: {{max_epochs: 3}}\n")

    with pytest.raises(ConfigError, match=r"update.rank_invariant: got True"):
        eject(config, ["update.global_micro_batches=2", "update.rank_invariant=true"])


def test_fp16_with_several_optimizers_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"task: {ROOT}/tests/replay/features.py:build\nrun: {{max_epochs: 3}}\n")

    with pytest.raises(ConfigError, match=r"update.precision: got 'fp16' with several optimizers"):
        eject(config, ["update.precision=fp16", *CASES["several"][:2]])


TASK = """
import torch
from ignite_engine import Task
{above}

def loss_fn(model, batch):
    return {loss}

def build(options):
    model = torch.nn.Linear(2, 1)
    return Task(model, loss_fn, torch.zeros(8, 2), sampler={sampler})
"""
LOSS = "model(batch).square().mean()"
MIXED_SCHEDULES = """
class Steady:
    def __init__(self, optimizer): self.optimizer = optimizer
    def step(self): pass
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

def optimizers(model):
    return {"weight": torch.optim.SGD([model.weight], 0.1), "bias": torch.optim.SGD([model.bias], 0.2)}

def schedule(optimizer):
    of_weight = optimizer.param_groups[0]["params"][0].dim() == 2
    return torch.optim.lr_scheduler.ConstantLR(optimizer) if of_weight else Steady(optimizer)
"""
REFUSED_TASKS = {
    "uses the engine": (
        {"above": "from ignite_engine import rng", "loss": f"{LOSS} * rng.mix(1)"},
        "fails without rng",
    ),
    "name": ({"above": "def mix(loss): return loss", "loss": f"mix({LOSS})"}, "defines 'mix'"),
    "beside": ({"above": "from beside import twice", "loss": f"twice({LOSS})"}, "beside.py, which its file imports"),
    "everything": ({"above": "from beside import *", "loss": f"twice({LOSS})"}, "imports * from beside"),
    "order": ({"sampler": "torch.utils.data.SequentialSampler(range(8))"}, "is that of a SequentialSampler"),
    "within": (
        {"above": "def scale():\n    from ignite_engine import rng\n    return 1", "loss": f"{LOSS} * scale()"},
        "imports the engine within",
    ),
    "**": ({"sampler": "None, **{}"}, "makes a run of * or **: name each argument"),
    "*": ({"sampler": "None, *()"}, "makes a run of * or **: name each argument"),
    "schedule": (
        {"above": MIXED_SCHEDULES, "sampler": "None, optimizer=optimizers, schedule=schedule"},
        "its schedule makes something other than a scheduler of torch",
    ),
}


@pytest.mark.parametrize("name", REFUSED_TASKS)
def test_task_that_needs_more_of_the_engine_is_refused(name: str, tmp_path: Path) -> None:
    fields, expected = REFUSED_TASKS[name]
    (tmp_path / "beside.py").write_text("import ignite.engine\n\ndef twice(loss):\n    return 2 * loss\n")
    module = f"task_{list(REFUSED_TASKS).index(name)}"
    (tmp_path / f"{module}.py").write_text(TASK.format(**{"above": "", "loss": LOSS, "sampler": None} | fields))
    config = tmp_path / "config.yaml"
    config.write_text(f"task: {module}.py:build\nrun: {{max_epochs: 1}}\n")

    with pytest.raises(ConfigError, match=re.escape(expected)) as refusal:
        eject(config)

    assert "\n" not in str(refusal.value)


def test_fit_without_its_function_or_another_model_is_refused(tmp_path: Path) -> None:
    with rng.isolated():
        fit_runs.unseeded(tmp_path / "run")

    with pytest.raises(ConfigError, match=r"give the function that calls it \(build, --build\)"):
        eject(tmp_path / "run")
    with pytest.raises(ConfigError, match="makes another model each time: seed torch in it"):
        eject(tmp_path / "run", build=fit_runs.unseeded)
