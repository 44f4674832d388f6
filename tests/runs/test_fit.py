"""``fit``: the run of a config from Python values, with errors that name its arguments."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from ignite.engine import Events
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import TensorDataset

import ignite_engine
import ignite_engine.runs.fit as fit_module
from ignite_engine import Interrupted, Task, TrainingEvents, fit, load_model, load_weights, seed_everything
from ignite_engine.config import ConfigError, ConfigWarning, config_from_dict
from ignite_engine.handlers import ClearMLLogger, LRSchedule, warmup_cosine
from ignite_engine.run_directory import weights_sha256
from ignite_engine.runs import recipe
from ignite_engine.task import IN_PYTHON, TaskError
from tests.kit.tiny import on_two_ranks

QUIET = {"logging": dict.fromkeys(("clearml", "progress", "report", "console", "memory", "throughput"), False)}
GENERATOR = torch.Generator().manual_seed(5)
INPUTS = torch.randn(60, 4, generator=GENERATOR)
TARGETS = torch.randint(3, (60,), generator=GENERATOR)
TRAIN, VAL = (INPUTS[:48], TARGETS[:48]), (INPUTS[48:], TARGETS[48:])


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def net():
    seed_everything(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))


def fitted(directory, **arguments):
    return fit(
        net(), loss_fn, TRAIN, VAL, directory=directory, **{"max_epochs": 3, "batch_size": 8, **QUIET, **arguments}
    )


def test_run_that_changes_its_working_directory_keeps_its_folder(tmp_path, monkeypatch, caplog):
    def move(trainer):
        os.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = fitted(Path("run"), handlers=[(move, Events.ITERATION_COMPLETED(once=3))])

    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
    assert len(run.history) == len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert str(run).startswith("Run(run: completed") and "was deleted during the run" not in caplog.text


@pytest.fixture
def signals_come_back():
    """After ``Interrupted`` they stay ignored, as the process is about to end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def at(iteration, act):
    return act, Events.ITERATION_COMPLETED(once=iteration)


def press_ctrl_c(trainer):
    os.kill(os.getpid(), signal.SIGINT)


def test_run_is_that_of_a_config_with_the_same_values(tmp_path):
    run = fitted(tmp_path / "fit", schedule={"name": "cosine", "warmup": 2}, lr=1e-2, clip_norm=1.0, seed=3)
    values = {
        "task": IN_PYTHON,
        "run": {"directory": str(tmp_path / "config"), "max_epochs": 3, "seed": 3},
        "data": {"batch_size": 8},
        "optimizer": {"lr": 1e-2},
        "schedule": {"name": "cosine", "warmup": 2},
        "update": {"clip_norm": 1.0},
        **QUIET,
    }
    of_config = recipe.build_run(
        config_from_dict(values),
        Task(net(), loss_fn, TensorDataset(*TRAIN), val_sets={"val": TensorDataset(*VAL)}),
    )

    assert of_config.train()["weights_sha256"] == run.summary["weights_sha256"]
    assert run.metrics == of_config.metrics and set(run.metrics) == {"grad_norm", "loss", "lr", "val/loss"}
    written = yaml.safe_load((tmp_path / "fit" / "config.yaml").read_text())
    assert written["run"].pop("name") == "fit" and written["run"].pop("directory") == str(tmp_path / "fit")
    theirs = of_config.config
    assert {**written, "run": None} == {**theirs, "run": None}
    assert re.fullmatch(rf"Run\({tmp_path}/fit: completed at iteration 18, loss \S+, val/loss \S+\)", repr(run))


def test_from_nothing_to_a_run_in_twelve_lines_of_the_readme(tmp_path, monkeypatch, caplog):
    page = Path(ignite_engine.__file__).parents[1].joinpath("README.md").read_text()
    script = next(block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "fit(" in block)
    assert len([line for line in script.splitlines() if line.strip()]) <= 12
    monkeypatch.chdir(tmp_path)
    first = {}
    exec(script, first)
    again = {}
    exec(script, again)
    run, folder = first["run"], tmp_path / "runs" / "first"

    assert run.summary["status"] == "completed"
    assert "val/accuracy" in run.metrics
    assert (folder / "report.html").exists() and (folder / "metrics.jsonl").exists()
    assert (folder / "checkpoints" / f"iteration_{run.summary['iteration']:08}").is_dir()
    assert "it is only evaluated" in caplog.text
    assert again["run"].summary["weights_sha256"] == run.summary["weights_sha256"]
    assert Path(run.evaluate()["checkpoint"]).parent == folder / "checkpoints"


OWN = {
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "schedule": lambda optimizer: warmup_cosine(optimizer, warmup=0.1),
    "metrics": {"accuracy": Accuracy()},
    "best": "val/accuracy",
}


def test_ctrl_c_stops_it_saved_and_the_same_call_resumes(tmp_path, monkeypatch, signals_come_back):
    whole = fitted(tmp_path / "whole", **OWN)
    with pytest.raises(Interrupted) as stop:
        fitted(tmp_path / "stopped", handlers=[at(4, press_ctrl_c)], **OWN)
    assert stop.value.code == 130
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    stopped = fitted(tmp_path / "stopped", handlers=[at(11, press_ctrl_c)], **OWN)

    assert stopped.trainer.state.status == "interrupted" and stopped.summary["iteration"] == 11
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = fitted(tmp_path / "stopped", **OWN)
    assert resumed.summary["resumed_from"] == "iteration_00000011"
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.metrics == whole.metrics
    assert resumed.config["optimizer"]["name"] == "SGD" and resumed.config["optimizer"]["momentum"] == 0.9
    assert resumed.config["schedule"] == {"name": "warmup_cosine(warmup=0.1, total=None, min_ratio=0.0)"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "number"),
    [(place, signal.SIGINT) for place in ("first batch", "step", "evaluation", "handler", "save")]
    + [("step", signal.SIGHUP)],
)
def test_signal_loses_nothing_wherever_it_comes(place, number, tmp_path, monkeypatch, signals_come_back):
    pressed = []

    def press_in(here):
        if here == place and not pressed:
            pressed.append(here)
            os.kill(os.getpid(), number)

    def collate(samples):
        press_in("first batch")
        return torch.utils.data.default_collate(samples)

    def pressing_loss(model, batch):
        press_in("step" if model.training else "evaluation")
        return loss_fn(model, batch)

    def sync(descriptor):
        if any((tmp_path / "stopped" / "checkpoints").glob(".tmp*")):
            press_in("save")
        fsync(descriptor)

    def run_in(folder):
        return fit(
            net(), pressing_loss, TRAIN, VAL, directory=tmp_path / folder, max_epochs=2, batch_size=8,
            evaluation={"sanity_batches": 0}, collate_fn=collate,
            handlers=[at(4, lambda trainer: press_in("handler"))], **QUIET,
        )  # fmt: skip

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(Interrupted) as stop:
        run_in("stopped")
    assert pressed == [place] and stop.value.code == (130 if number == signal.SIGINT else 143)
    resumed, whole = run_in("stopped"), run_in("whole")
    assert resumed.summary["resumed_from"] is not None and resumed.metrics == whole.metrics
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_call_that_is_refused_leaves_a_stopped_run_as_it_was(tmp_path):
    whole = fitted(tmp_path / "whole")
    fitted(tmp_path / "run", handlers=[at(4, lambda trainer: trainer.request_stop("a test"))])
    files = [tmp_path / "run" / name for name in ("config.yaml", "environment.json", "summary.json")]
    before = [file.read_bytes() for file in files]

    for wrong in ({"resume": {"lr": "fast"}}, {"seed": 5}):
        with pytest.raises((ConfigError, ValueError)):
            fitted(tmp_path / "run", **wrong)
        assert [file.read_bytes() for file in files] == before
    assert fitted(tmp_path / "run").summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_optimizer_may_be_made_already_and_handlers_have_events(tmp_path):
    model, seen = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = LRSchedule(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), name="per_epoch")
    fit(
        model,
        loss_fn,
        list(TensorDataset(*TRAIN)),
        directory=tmp_path,
        max_iters=12,
        batch_size=8,
        optimizer=optimizer,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5),
        schedule_per="step",
        handlers=[(lambda trainer: seen.append(optimizer.param_groups[0]["lr"]), Events.ITERATION_STARTED)],
        **QUIET,
    )

    assert seen == [0.1] * 6 + [0.05] * 6
    fitted(tmp_path / "third", handlers=[(lambda trainer, error: None, Events.EXCEPTION_RAISED)])
    with pytest.raises(ValueError, match="is not one of the trainer's"):
        fitted(tmp_path / "other", handlers=[(steps, Events.EPOCH_COMPLETED)])


def test_last_epoch_that_is_cut_short_is_evaluated_once_at_its_end(tmp_path):
    """So that the last checkpoint has a value, and may be the best."""
    seen = []

    class Watch:
        def attach(self, trainer):
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=10), lambda: trainer.terminate_epoch())
            trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, lambda: seen.append(trainer.state.iteration))

    for evaluation in ({"every": {"epochs": 0.5}}, {"every": None}):
        seen.append(0)
        run = fitted(tmp_path / str(len(seen)), max_epochs=2, handlers=[Watch()], evaluation=evaluation)
        manifest = run.checkpoint.store.checkpoints()[-1].manifest
        assert manifest.iteration == 10 and "val/loss" in manifest.metrics
    assert seen == [0, 3, 6, 9, 10, 0, 10]


@pytest.mark.parametrize(("max_epochs", "end"), [(2, 9), (1, 6)])
def test_of_two_limits_the_first_ends_the_run_and_its_schedule(tmp_path, max_epochs, end):
    run = fitted(tmp_path, max_epochs=max_epochs, max_iters=9, schedule="linear")

    assert run.trainer.state.iteration == run.total == end and f"total={end}" in repr(run.schedules["optimizer"])
    assert run.history[-1]["iteration"] == end and "val/loss" in run.metrics


def test_columns_may_be_arrays_and_must_be_of_one_length(tmp_path):
    arrays = (INPUTS[:48].numpy(), TARGETS[:48].numpy())
    run = fit(net(), loss_fn, arrays, VAL, directory=tmp_path / "arrays", max_epochs=3, batch_size=8, **QUIET)

    assert run.summary["weights_sha256"] == fitted(tmp_path / "tensors").summary["weights_sha256"]
    with pytest.raises(ValueError, match="train_set has columns of 48, 60 samples: give as many of each"):
        fit(net(), loss_fn, (INPUTS[:48], TARGETS), directory=tmp_path, max_epochs=1)


def test_model_of_a_run_of_python_is_loaded_into_one_that_is_made_there(tmp_path):
    run = fitted(tmp_path, max_epochs=1)
    with pytest.raises(TaskError, match=r"was made by fit\(\) in Python.*load_weights\(model, run\)"):
        load_model(tmp_path)
    model = net()
    load_weights(model, tmp_path, which="last")

    assert weights_sha256(model) == run.summary["weights_sha256"]


def test_setting_without_effect_is_a_warning_about_the_argument(tmp_path):
    with pytest.warns(ConfigWarning, match=r"^fit\(\): checkpoint\.mode has no effect without checkpoint\.best\.$"):
        fitted(tmp_path, mode="max", max_epochs=None, max_iters=1)


@pytest.mark.parametrize(
    ("best", "mode"), [("val/accuracy", "max"), ("val/loss", "min"), ("val/top1_accuracy", "max"), ("val/mae", "min")]
)
def test_name_of_the_best_metric_tells_which_value_is_better(tmp_path, best, mode):
    metrics = {best.partition("/")[2]: Accuracy()}
    assert fitted(tmp_path, best=best, metrics=metrics, max_epochs=1).config["checkpoint"]["mode"] == mode


SCRIPT = """
import sys
from tests.runs.test_fit import fitted
print(fitted(sys.argv[1], max_epochs=2).summary["weights_sha256"])
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_of_a_plain_script_and_ranks_of_ones_own_train_together(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(ignite_engine.__file__).parents[1])
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py", "launched"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr

    def case(rank):
        torch.set_num_threads(1)
        run = fitted(tmp_path / "forked", max_epochs=2)
        return {"sha": run.summary["weights_sha256"], "size": run.summary["world_size"]}

    answers = on_two_ranks(case, tmp_path / "meeting")
    assert answers["size"] == [2, 2]
    launched = re.findall(r"[0-9a-f]{64}", done.stdout)  # both ranks print at once
    assert set(launched) == set(answers["sha"]) and len(launched) == 2


def test_a_metric_that_is_a_tensor_does_not_end_the_run(tmp_path):
    """A forgotten ``.item()``; also where a handler writes it after the last log point."""

    def forget(trainer):
        trainer.state.metrics["mine"] = torch.tensor(1.5)
        trainer.call_at_end(lambda trainer: trainer.state.metrics.update(late=torch.tensor(2.5), vector=torch.ones(2)))

    run = fitted(tmp_path, max_epochs=1, handlers=[(forget, Events.EPOCH_COMPLETED)])

    assert (run.summary["status"], run.metrics["mine"], run.metrics["late"]) == ("completed", 1.5, 2.5)
    assert run.metrics["vector"] == [1.0, 1.0]


@pytest.mark.parametrize(("server", "asked", "there"), [(False, None, False), (True, None, True), (False, True, True)])
def test_clearml_is_for_who_has_a_server_or_asks_for_it(server, asked, there, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_module, "server_is_configured", lambda: server)
    logging = {key: value for key, value in QUIET["logging"].items() if key != "clearml"}
    logging |= {} if asked is None else {"clearml": asked}
    attached = []
    monkeypatch.setattr(ClearMLLogger, "attach", lambda self, trainer: attached.append(self))
    fitted(tmp_path, max_epochs=None, max_iters=1, logging=logging)
    assert bool(attached) == there


@pytest.mark.parametrize("schedule", ["cosine", None])
def test_another_rate_for_a_resumed_run(tmp_path, schedule):
    """From there on those of a run that began with it; the same call again goes on, and so does one without."""

    def rates(folder, stop, **options):
        used = {}

        def note(trainer):
            optimizer = next(iter(trainer.update.optimizers.values()))
            used[trainer.state.iteration] = optimizer.param_groups[0]["lr"]
            if trainer.state.iteration == stop:
                trainer.request_stop("test")

        handlers = [(note, Events.ITERATION_STARTED)]
        fitted(tmp_path / folder, schedule=schedule, handlers=handlers, **options)
        return used

    whole = rates("whole", None, lr=0.25)
    expected = {number: pytest.approx(lr) for number, lr in whole.items()}
    rates("run", 4, lr=0.5)
    changed = rates("run", 8, lr=0.5, resume={"lr": 0.25})
    changed |= rates("run", 10, lr=0.5, resume={"lr": {"optimizer": 0.25}})
    changed |= rates("run", None, lr=0.5)
    assert changed == {number: lr for number, lr in expected.items() if number > 4} and len(changed) > 8
    with pytest.raises(TypeError, match="resume must be a mapping such as"):
        fitted(tmp_path / "run", resume=0.25)
