"""``fit``: the run of a config from Python values."""

import os
import re
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from ignite.engine import Events
from ignite.metrics import Accuracy, MeanAbsoluteError

import ignite_engine
from ignite_engine import Interrupted, TrainingEvents, fit
from ignite_engine.handlers import LRSchedule, warmup_cosine
from ignite_engine.runs.config import ConfigWarning, load_config
from tests.kit.fitting import (
    INPUTS,
    QUIET,
    TARGETS,
    TRAIN,
    VAL,
    at,
    digest,
    fitted,
    log,
    loss_fn,
    manifest,
    net,
    points,
)
from tests.kit.floors import has
from tests.kit.processes import ranks

ROOT = Path(ignite_engine.__file__).parents[1]


def press_ctrl_c(trainer):
    os.kill(os.getpid(), signal.SIGINT)


def test_the_readmes_run_trains_and_the_same_script_again_only_evaluates(tmp_path, monkeypatch, caplog):
    script = next(
        block for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "fit(" in block
    )
    monkeypatch.chdir(tmp_path)
    first, again = {}, {}
    for names in (first, again):
        exec(script.replace("\nfit(", "\nrun = fit("), names)
    run, folder = first["run"], tmp_path / "runs" / "first"

    assert run.summary["status"] == "completed" and run.metrics["loss"] < 0.5
    assert (folder / "report.html").exists() == has("report") and points(folder)
    assert "only evaluated" in caplog.text and digest(again["run"]) == digest(run)
    assert Path(run.evaluate()["checkpoint"]).parent == folder / "checkpoints"


def test_values_of_a_call_and_of_its_config_are_the_same(tmp_path):
    run = fitted(tmp_path, schedule={"name": "cosine", "warmup": 2}, lr=1e-2, clip_norm=1.0, seed=3)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())

    assert set(run.metrics) == {"grad_norm", "loss", "lr", "val/loss"}
    assert written["schedule"]["name"] == "cosine" and written["schedule"]["warmup"] == 2
    assert (written["optimizer"]["lr"], written["update"]["clip_norm"], written["run"]["seed"]) == (1e-2, 1.0, 3)
    sections = {name: written[name] for name in ("schedule", "optimizer", "update", "data")}
    again = fitted(tmp_path / "again", batch_size=None, seed=3, **sections)
    assert digest(again) == digest(run)
    assert "completed at iteration 18" in repr(run)


OWN = {
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "schedule": lambda optimizer: warmup_cosine(optimizer, warmup=0.1),
    "metrics": {"accuracy": Accuracy()},
    "best": "val/accuracy",
}


def test_ctrl_c_saves_and_ends_a_script_returns_in_a_session_and_the_same_call_resumes(tmp_path, monkeypatch):
    whole = fitted(tmp_path / "whole", **OWN)
    with pytest.raises(Interrupted) as stopped:
        fitted(tmp_path / "run", handlers=[at(4, press_ctrl_c)], **OWN)
    assert stopped.value.code == 130
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    session = fitted(tmp_path / "run", handlers=[at(11, press_ctrl_c)], **OWN)
    assert session.summary["status"] == "interrupted" and session.summary["iteration"] == 11
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    resumed = fitted(tmp_path / "run", **OWN)
    assert resumed.summary["resumed_from"] == "iteration_00000011"
    assert digest(resumed) == digest(whole) and resumed.metrics == whole.metrics
    assert resumed.config["optimizer"]["momentum"] == 0.9 and "warmup_cosine" in resumed.config["schedule"]["task"]
    assert load_config(tmp_path / "run" / "config.yaml").to_dict() == resumed.config


@pytest.mark.parametrize(
    ("place", "number"),
    [
        *(pytest.param(place, signal.SIGINT, marks=pytest.mark.nightly) for place in ("first batch", "save")),
        *(("evaluation", signal.SIGINT), ("step", signal.SIGHUP)),
    ],
)
def test_a_signal_loses_nothing_wherever_it_comes(place, number, tmp_path, monkeypatch):
    pressed, fsync = [], os.fsync

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
        press_in("save" if any((tmp_path / "run" / "checkpoints").glob(".tmp*")) else "")
        fsync(descriptor)

    def run_in(folder):
        return fitted(
            tmp_path / folder, pressing_loss, max_epochs=2, Evaluation={"sanity_batches": 0}, collate_fn=collate
        )

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(Interrupted) as stop:
        run_in("run")
    assert pressed == [place] and stop.value.code == (130 if number == signal.SIGINT else 143)
    resumed, whole = run_in("run"), run_in("whole")
    assert resumed.summary["resumed_from"] is not None and resumed.metrics == whole.metrics
    assert digest(resumed) == digest(whole)


def test_an_optimizer_that_is_made_already_is_used(tmp_path):
    model, seen = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.optim.lr_scheduler.StepLR
    note = (lambda trainer: seen.append(optimizer.param_groups[0]["lr"]), Events.ITERATION_STARTED)
    schedule = {"schedule": lambda optimizer: step(optimizer, 6, 0.5), "schedule_per": "step"}
    fitted(tmp_path, model=model, optimizer=optimizer, max_epochs=2, handlers=[note], **schedule)
    assert seen == [0.1] * 6 + [0.05] * 6

    foreign = LRSchedule(step(torch.optim.SGD(net().parameters(), lr=0.1), 1, 0.5), name="other")
    with pytest.raises(ValueError, match="trainer's"):
        fitted(tmp_path / "other", handlers=[(foreign, Events.EPOCH_COMPLETED)])


STEP, CYCLE = torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.CyclicLR


@pytest.mark.parametrize(
    ("schedule", "per", "rates"),
    [
        (lambda optimizer: STEP(optimizer, 1, 0.5), None, [1e-3, 5e-4, 2.5e-4]),
        (lambda optimizer: STEP(optimizer, 1, 0.5), "step", [1e-3 / 2**5, 1e-3 / 2**11, 1e-3 / 2**17]),
        (lambda optimizer: CYCLE(optimizer, 1e-3, 5e-3, 3), None, [1e-3 + 4e-3 / 3] * 3),
        ("none", None, [1e-3] * 3),
    ],
)
def test_a_torch_scheduler_steps_once_per_epoch_unless_it_is_meant_for_updates(schedule, per, rates, tmp_path):
    used = []

    def note(trainer):
        used.append(trainer.update.optimizers["optimizer"].param_groups[0]["lr"])

    fitted(tmp_path, schedule=schedule, schedule_per=per, handlers=[(note, Events.ITERATION_STARTED(every=6))])
    assert used == pytest.approx(rates)


def test_the_rate_falls_where_a_metric_stops_improving(tmp_path):
    """The first value is the best; the second and third after it are not better, and the fourth update is slower."""
    plateau = {
        "name": "plateau",
        "metric": "val/loss",
        "factor": 0.5,
        "patience": 2,
        "min_ratio": 0.3,
        "min_delta": 1e9,
    }
    fitted(tmp_path, schedule=plateau, Evaluation={"every": 1}, MetricLogger={"every": 1}, lr=1.0, max_iters=10)
    assert [line["lr"] for line in log(tmp_path)] == [1.0] * 3 + [0.5] * 2 + [0.3] * 5


def test_the_last_epoch_is_evaluated_once_also_where_it_is_cut_short(tmp_path):
    seen = []

    class Watch:
        def attach(self, trainer):
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=10), lambda: trainer.terminate_epoch())
            trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, lambda: seen.append(trainer.state.iteration))

    for folder, every in (("half", {"epochs": 0.5}), ("never", None)):
        fitted(tmp_path / folder, max_epochs=2, handlers=[Watch()], Evaluation={"every": every})
        assert "val/loss" in manifest(tmp_path / folder, 10)["metrics"]
    assert seen == [3, 6, 9, 10, 10]


@pytest.mark.parametrize(("max_epochs", "end"), [(2, 9), (1, 6)])
def test_of_two_limits_the_first_ends_the_run_and_its_schedule(max_epochs, end, tmp_path):
    run = fitted(tmp_path, max_epochs=max_epochs, max_iters=9, schedule="linear", MetricLogger={"every": 1})
    assert run.summary["iteration"] == end and points(tmp_path)[-1] == end
    assert log(tmp_path)[-1]["lr"] == pytest.approx(1e-3 / end)


def test_data_may_be_arrays(tmp_path):
    arrays = (INPUTS[:48].numpy(), TARGETS[:48].numpy())
    assert digest(fitted(tmp_path / "arrays", train=arrays)) == digest(fitted(tmp_path / "tensors"))


def test_a_metric_is_measured_with_predict_and_the_loss_where_there_is_none(tmp_path):
    def predict(model, batch):
        return model(batch[0])[:, 0], batch[0][:, 0]

    sets = {"val": VAL, "other": VAL}
    run = fitted(tmp_path, val=sets, predict=predict, metrics={"mae": MeanAbsoluteError()}, max_epochs=1)
    assert run.metrics["val/mae"] == run.metrics["other/mae"] > 0


@pytest.mark.parametrize(("best", "mode"), [("val/accuracy", "max"), ("val/loss", "min"), ("val/mae", "min")])
def test_the_name_of_the_best_metric_tells_which_value_is_better(best, mode, tmp_path):
    run = fitted(tmp_path, best=best, metrics={best.partition("/")[2]: Accuracy()}, max_epochs=1)
    assert run.checkpoint.options.mode == mode


@pytest.mark.parametrize("fails", [False, True])
def test_torch_is_afterwards_as_before(fails, tmp_path):
    def of_torch():
        precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
        return torch.are_deterministic_algorithms_enabled(), precision, threads

    def loss(model, batch):
        assert of_torch() == (True, "high", 3) and not fails
        return loss_fn(model, batch)

    before, settings = of_torch(), {"deterministic": True, "matmul_precision": "high", "threads": 3}
    with pytest.raises(AssertionError) if fails else nullcontext():
        fitted(tmp_path, loss, run=settings, max_epochs=1).evaluate()
    assert of_torch() == before


def test_a_setting_without_effect_is_a_warning(tmp_path):
    with pytest.warns(ConfigWarning, match=r"mode.*best"):
        fitted(tmp_path, mode="max", max_iters=1)


@pytest.mark.parametrize("kind", ["tensor", "number", "vector", "late"])
def test_a_metric_that_a_handler_writes_may_be_a_tensor(kind, tmp_path):
    def write(trainer):
        value = {"number": 1.5, "vector": torch.ones(2)}.get(kind, torch.tensor(1.5))
        late = trainer.call_at_end if kind == "late" else lambda act: act(trainer)
        late(lambda trainer: trainer.state.metrics.update(mine=value))

    run = fitted(tmp_path, max_epochs=1, handlers=[(write, Events.EPOCH_COMPLETED)])
    assert run.metrics["mine"] == ([1.0, 1.0] if kind == "vector" else 1.5)
    assert run.summary["status"] == "completed"


@pytest.mark.parametrize("schedule", ["cosine", pytest.param(None, marks=pytest.mark.nightly)])
def test_a_resumed_run_goes_on_with_another_rate(schedule, tmp_path):
    """From there on those of a run that began with it; the same call again goes on, and so does one without."""

    def rates(folder, last, **options):
        used = {}

        def note(trainer):
            used[trainer.state.iteration] = trainer.update.optimizers["optimizer"].param_groups[0]["lr"]
            if trainer.state.iteration == last:
                trainer.request_stop("test")

        fitted(tmp_path / folder, schedule=schedule, handlers=[(note, Events.ITERATION_STARTED)], **options)
        return used

    expected = rates("whole", None, lr=0.25)
    rates("run", 4, lr=0.5)
    changed = rates("run", 8, lr=0.5, resume={"lr": 0.25})
    changed |= rates("run", 10, lr=0.5, resume={"lr": {"optimizer": 0.25}})
    changed |= rates("run", None, lr=0.5)
    assert changed == pytest.approx({number: lr for number, lr in expected.items() if number > 4})


def test_several_optimizers_have_a_schedule_each_and_resume_exactly(tmp_path):
    def two(model):
        return {
            "first": torch.optim.Adagrad(model[0].parameters(), lr=0.1),
            "last": torch.optim.AdamW(model[2].parameters(), lr=0.01),
        }

    def run(folder, last=None):
        handlers = [] if last is None else [at(last, lambda trainer: trainer.request_stop("test"))]
        return fitted(tmp_path / folder, optimizer=two, schedule="linear", handlers=handlers, MetricLogger={"every": 1})

    whole = run("whole")
    lines = log(tmp_path / "whole")
    assert [line["lr/first"] for line in lines[:2]] == pytest.approx([0.1, 0.1 * 17 / 18])
    assert [line["lr/last"] for line in lines[:2]] == pytest.approx([0.01, 0.01 * 17 / 18])
    run("parts", 4)
    assert digest(run("parts")) == digest(whole) and log(tmp_path / "parts") == lines


def test_ranks_that_exist_train_together(tmp_path):
    def fit_on(rank):
        run = fitted(tmp_path / "run", max_epochs=2)
        return digest(run), run.summary["world_size"], run.summary["iteration"]

    (first, size, iteration), second = ranks(2, fit_on)
    assert (first, size, iteration) == second and (size, iteration) == (2, 6)


def test_a_run_that_changes_its_working_directory_keeps_its_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    fitted(Path("run"), handlers=[at(3, lambda trainer: os.chdir(tmp_path / "elsewhere"))])

    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert (tmp_path / "run" / "summary.json").exists() and points(tmp_path / "run")


def test_a_user_of_fit_in_a_batch_script_needs_no_arguments_but_data(tmp_path):
    run = fit(net(), loss_fn, TRAIN, directory=tmp_path, max_iters=2, handlers=QUIET)
    assert run.config["data"]["batch_size"] == 32 and "val/loss" not in run.metrics
