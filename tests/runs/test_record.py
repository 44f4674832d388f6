"""The record of a run is what was in force: its config, history, checkpoints, report and comparison say one thing."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import yaml
from ignite.engine import Events

from ignite_engine import seed_everything
from ignite_engine.config import config_from_dict
from ignite_engine.ext.report.records import read_run
from ignite_engine.run_directory import flat
from ignite_engine.runs import recipe
from tests.runs.test_recipe import LOGGING, make_task

Sections = Mapping[str, Mapping[str, Any]]


def made(folder, sections=None, *, end=8, **parts):
    values = {
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


def records(folder):
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


CHANGED = {
    "clip_norm": {"update": {"clip_norm": 0.5}},
    "schedule": {"schedule": {"name": "cosine", "warmup": 2}},
    "accumulation": {"update": {"accumulation_steps": 2}},
    "ema": {"ema": {"decay": 0.5}},
    "workers and logging": {"data": {"eval_batch_size": 2}, "logging": {**LOGGING, "every": 3}},
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting_with_an_effect_is_in_each_record(tmp_path, name):
    made(tmp_path, {"ema": {"decay": 0.9}}, end=3).train()
    run = made(tmp_path, {"ema": {"decay": 0.9}, **CHANGED[name]}, end=4)
    run.train()
    for place, settings in records(tmp_path).items():
        for section, values in CHANGED[name].items():
            assert {key: settings[f"{section}.{key}"] for key in values} == values, place
    update = run.trainer.update
    in_force = {
        "clip_norm": lambda: update.clip_norm == 0.5,
        "schedule": lambda: update.optimizers["optimizer"].param_groups[0]["lr"] < 0.001,
        "accumulation": lambda: run.trainer.accumulation_steps == 2,
        "ema": lambda: run.trainer.registry.objects["ema"].decay == 0.5,
        "workers and logging": lambda: True,
    }
    assert in_force[name]()


REFUSED = {
    "another seed": ({"run": {"seed": 7}}, "was made with seed 0"),
    "a removed section": ({"ema": {"decay": None}}, r"holds \['ema'\]"),
    "strict": (
        {"checkpoint": {"strict": True}, "run": {"threads": torch.get_num_threads() + 1}},
        "cannot be resumed bit for bit",
    ),
    "an unknown optimizer": ({"checkpoint": {"resume": {"lr": {"optimzer": 1.0}}}}, "did you mean 'optimizer'"),
    "another optimizer": ({"optimizer": {"name": "SGD", "lr": 0.5}}, "The optimizer is SGD and the saved one was"),
    "another batch size": ({"data": {"batch_size": 3}}, "batch"),
}


@pytest.mark.row("F10")
@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_start_that_is_refused_leaves_the_record_of_the_run_as_it_was(tmp_path, name, is_finished):
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


def test_a_stop_while_it_resumes_leaves_the_record_as_it_was(tmp_path, monkeypatch):
    made(tmp_path, end=3).train()
    before = (tmp_path / "summary.json").read_bytes()
    run = made(tmp_path)

    def press_ctrl_c(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.checkpoint, "resume", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert (tmp_path / "summary.json").read_bytes() == before


def test_a_start_that_fails_in_a_handler_is_in_the_summary(tmp_path):
    """It was not refused: the run itself has failed; its settings were in force in no update."""
    made(tmp_path, end=3).train()
    before = (tmp_path / "config.yaml").read_bytes()
    run = made(tmp_path, {"update": {"clip_norm": 0.5}})

    def fail():
        raise KeyError("lost")

    run.trainer.add_event_handler(Events.STARTED, fail)
    with pytest.raises(KeyError):
        run.train()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert (tmp_path / "config.yaml").read_bytes() == before
