"""The record of a run is what was in force: its config, history, checkpoints, report and comparison say one thing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from ignite.engine import Events

from ignite_engine import seed_everything
from ignite_engine.cli.arguments import main
from ignite_engine.config import config_from_dict
from ignite_engine.report.records import read_run
from ignite_engine.run_directory import flat
from ignite_engine.runs import recipe
from ignite_engine.runs.run import Run
from tests.runs.test_recipe import LOGGING, make_task

Sections = Mapping[str, Mapping[str, Any]]


def made(folder: Path, sections: Sections | None = None, *, end: int = 8, **parts: Any) -> Run:
    values: dict[str, Any] = {
        "task": "unused.py:build",
        "data": {"batch_size": 4},
        "logging": LOGGING,
        "run": {"directory": str(folder), "max_iterations": 16, "name": "run"},
        "checkpoint": {"every": 2},
    }
    for name, section in (sections or {}).items():
        values[name] = {**values.get(name, {}), **section}
    config = config_from_dict(values)
    seed_everything(config.run.seed)
    run = recipe.build_run(config, make_task(**parts))
    last = run.trainer.state.iteration + end
    run.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(event_filter=lambda engine, count: count - (run.first_iteration or 0) == last),
        lambda: run.trainer.request_stop("test"),
    )
    return run


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings by dotted key, in each place that shows them."""
    newest = max((folder / "checkpoints").glob("iteration_*"))
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    starts = [line["config"] for line in history if line["what"] in ("started", "resumed")]
    return {
        "config.yaml": flat(yaml.safe_load((folder / "config.yaml").read_text())),
        "history.jsonl": flat(starts[-1]),
        "manifest.json": flat(json.loads((newest / "manifest.json").read_text())["config"]),
        "report": flat(read_run(folder).config),
    }


def of_optimizer(run: Run, option: str) -> Any:
    """The optimizer's own number; of a rate the base."""
    if option == "lr" and run.schedules:
        return run.schedules["optimizer"].base_lrs[0]
    value = run.trainer.update.optimizers["optimizer"].param_groups[0][option]  # type: ignore[attr-defined]
    return list(value) if isinstance(value, tuple) else value


OPTIONS: dict[str, Any] = {"lr": 0.005, "weight_decay": 0.25, "betas": [0.5, 0.75], "eps": 1e-3, "amsgrad": True}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_changed_option_without_effect_is_in_no_record(
    tmp_path: Path, option: str, schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names it, and how to change it; the same words change it, and then it is in all of them."""
    key, value, sections = f"optimizer.{option}", OPTIONS[option], {"schedule": {"name": schedule}}
    made(tmp_path, sections, end=3).train()
    before = records(tmp_path)
    caplog.clear()
    ignored = made(tmp_path, {**sections, "optimizer": {option: value}}, end=3)
    ignored.train()

    (warning,) = [line for line in caplog.messages if "no effect" in line]
    assert f"{key!r}: {value}" in warning and "checkpoint.override" in warning
    own = of_optimizer(ignored, option)
    assert own != value
    for place, settings in records(tmp_path).items():
        assert settings.get(key, "default") == before[place].get(key, "default"), place
        assert settings.get(key, own) == own, place
    if option == "amsgrad":
        return  # needs a state that is not there
    caplog.clear()
    changed = made(tmp_path, {**sections, "checkpoint": {"every": 2, "override": {key: value}}}, end=3)
    changed.train()
    assert of_optimizer(changed, option) == value and not [line for line in caplog.messages if "no effect" in line]
    assert {place: settings[key] for place, settings in records(tmp_path).items()} == dict.fromkeys(before, value)
    made(tmp_path, sections, end=3).train()
    assert {place: settings[key] for place, settings in records(tmp_path).items()} == dict.fromkeys(before, value)


def test_the_rate_of_a_plateau_is_recorded_as_it_is(tmp_path: Path) -> None:
    sections: Sections = {"schedule": {"name": "plateau", "metric": "val/loss"}}
    made(tmp_path, sections, end=3).train()
    before = records(tmp_path)
    made(tmp_path, {**sections, "optimizer": {"lr": 0.5}}, end=3).train()
    rates = {place: settings["optimizer.lr"] for place, settings in before.items()}
    assert {place: settings["optimizer.lr"] for place, settings in records(tmp_path).items()} == rates
    override = {"every": 2, "override": {"optimizer.lr": np.float64(0.005)}}
    made(tmp_path, {**sections, "checkpoint": override}, end=3).train()
    assert {place: settings["optimizer.lr"] for place, settings in records(tmp_path).items()} == dict.fromkeys(
        before, 0.005
    )


CHANGED: dict[str, Sections] = {
    "clip_norm": {"update": {"clip_norm": 0.5}},
    "schedule": {"schedule": {"name": "cosine", "warmup": 2}},
    "accumulation": {"update": {"accumulation_steps": 2}},
    "ema": {"ema": {"decay": 0.5}},
    "workers and logging": {"data": {"eval_batch_size": 2}, "logging": {**LOGGING, "every": 3}},
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting_with_an_effect_is_in_each_record(tmp_path: Path, name: str) -> None:
    made(tmp_path, {"ema": {"decay": 0.9}}, end=3).train()
    run = made(tmp_path, {"ema": {"decay": 0.9}, **CHANGED[name]}, end=4)
    run.train()
    for place, settings in records(tmp_path).items():
        for section, values in CHANGED[name].items():
            assert {key: settings[f"{section}.{key}"] for key in values} == values, place
    update: Any = run.trainer.update
    in_force = {
        "clip_norm": lambda: update.clip_norm == 0.5,
        "schedule": lambda: update.optimizers["optimizer"].param_groups[0]["lr"] < 0.001,
        "accumulation": lambda: run.trainer.accumulation_steps == 2,
        "ema": lambda: run.trainer.registry.objects["ema"].decay == 0.5,  # type: ignore[attr-defined]
        "workers and logging": lambda: True,
    }
    assert in_force[name]()


def test_options_of_the_loss_scaler_without_effect_are_in_no_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first: Sections = {"update": {"precision": "fp16", "grad_scaler": {"growth_interval": 3, "init_scale": 8.0}}}
    other: Sections = {"update": {"precision": "fp16", "grad_scaler": {"growth_interval": 5, "init_scale": 8.0}}}
    made(tmp_path, first, end=3).train()
    caplog.clear()
    run = made(tmp_path, other, end=3)
    run.train()
    (warning,) = [line for line in caplog.messages if "no effect" in line]
    assert "The loss scaler was changed (growth_interval 3 to 5)" in warning and "['scaler']" in warning
    assert run.trainer.update.scaler.get_growth_interval() == 3  # type: ignore[attr-defined]
    for place, settings in records(tmp_path).items():
        assert settings["update.grad_scaler.growth_interval"] == 3, place


@pytest.mark.parametrize("own", [False, True])
def test_an_optimizer_of_the_task_is_recorded_as_it_is(tmp_path: Path, own: bool) -> None:
    def sgd(lr: float) -> Any:
        return lambda model: torch.optim.SGD(
            [{"params": [next(model.parameters())], "lr": lr / 10}, {"params": list(model.parameters())[1:]}],
            lr=lr,
            momentum=0.5,
        )

    made(tmp_path, end=3, optimizer=sgd(0.25)).train()
    run = made(tmp_path, end=3, optimizer=sgd(0.5))
    run.train()
    assert [group["lr"] for group in run.trainer.update.optimizers["optimizer"].param_groups] == [0.025, 0.25]  # type: ignore[attr-defined]
    assert {place: settings["optimizer.lr"] for place, settings in records(tmp_path).items()} == dict.fromkeys(
        ("config.yaml", "history.jsonl", "manifest.json", "report"), 0.25
    )


REFUSED: dict[str, tuple[Sections, str]] = {
    "another seed": ({"run": {"seed": 7}}, "was made with seed 0"),
    "a removed section": ({"ema": {"decay": None}}, r"holds \['ema'\]"),
    "strict": (
        {"checkpoint": {"strict": True}, "run": {"threads": torch.get_num_threads() + 1}},
        "cannot be resumed bit for bit",
    ),
    "an unknown override": ({"checkpoint": {"override": {"optimizer.lrr": 1.0}}}, "did you mean 'lr'"),
    "another optimizer": ({"optimizer": {"name": "SGD", "lr": 0.5}}, "The optimizer is SGD and the saved one was"),
    "another batch size": ({"data": {"batch_size": 3}}, "batch"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_start_that_is_refused_leaves_the_record_of_the_run_as_it_was(
    tmp_path: Path, name: str, is_finished: bool
) -> None:
    sections, message = REFUSED[name]
    made(tmp_path, {"ema": {"decay": 0.9}}, end=99 if is_finished else 3).train()
    names = ("config.yaml", "environment.json", "summary.json", "report.html", "history.jsonl", "metrics.jsonl")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    threads = torch.get_num_threads()
    try:
        with pytest.raises(ValueError, match=message):
            made(tmp_path, {"ema": {"decay": 0.9}, **sections}).train()
    finally:
        torch.set_num_threads(threads)
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    assert "The run failed" not in (tmp_path / "summary.json").read_text()


def test_a_stop_while_it_resumes_leaves_the_record_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, end=3).train()
    before = (tmp_path / "summary.json").read_bytes()
    run = made(tmp_path)

    def press_ctrl_c(ignore: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.checkpoint, "resume", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert (tmp_path / "summary.json").read_bytes() == before


def test_a_start_that_fails_in_a_handler_is_in_the_summary(tmp_path: Path) -> None:
    """It was not refused: the run itself has failed; its settings were in force in no update."""
    made(tmp_path, end=3).train()
    before = (tmp_path / "config.yaml").read_bytes()
    run = made(tmp_path, {"update": {"clip_norm": 0.5}})

    def fail() -> None:
        raise KeyError("lost")

    run.trainer.add_event_handler(Events.STARTED, fail)
    with pytest.raises(KeyError):
        run.train()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_compare_shows_the_settings_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        made(tmp_path / name, end=3).train()
    made(tmp_path / "b", {"optimizer": {"lr": 0.765432}}, end=3).train()
    page = tmp_path / "compare.html"
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(page)]) == 0
    assert "0.765432" not in page.read_text()
    override = {"checkpoint": {"every": 2, "override": {"optimizer.lr": 0.765432}}}
    made(tmp_path / "b", override, end=3).train()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(page)]) == 0
    assert "0.765432" in page.read_text()
