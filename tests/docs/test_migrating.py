"""docs/migrating.md: the right-hand cells run, table by table, and have the effects that they claim."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ignite_engine.config import ConfigError, config_from_dict, other_names
from tests.docs.test_snippets import DOCS, blocks_of

PAGE = DOCS / "migrating.md"


@dataclass
class Section:
    """A heading, its Python blocks, and the right-hand cells of its table: line on the page, and code."""

    title: str
    blocks: list[tuple[int, str]] = field(default_factory=list)
    cells: list[tuple[int, str]] = field(default_factory=list)


def sections() -> list[Section]:
    found = [Section("")]
    blocks = {block.line: block for block in blocks_of(PAGE)}
    fenced = False
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
            if fenced:
                found[-1].blocks.append((number + 1, blocks[number + 1].text))
        elif not fenced and line.startswith("## "):
            found.append(Section(line[3:]))
        elif not fenced and line.startswith("| ") and not line.endswith("| here |"):
            found[-1].cells.append((number, line.removesuffix(" |").split(" | ", 1)[1]))
    return found


PREPARATION, *SECTIONS, GENERATOR = sections()


def run(code: str, line: int, namespace: dict[str, Any]) -> None:
    exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), namespace)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_there_is_a_table_for_each_system() -> None:
    assert [section.title for section in SECTIONS] == list(EFFECTS)
    assert all(len(section.cells) >= 10 for section in SECTIONS)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_each_right_hand_cell_is_code_that_runs(section: Section) -> None:
    namespace: dict[str, Any] = {"__name__": "migrating"}
    for line, code in [*PREPARATION.blocks, *section.blocks]:
        run(code, line, namespace)
    for line, cell in section.cells:
        parts = cell.split("<br>")
        assert all(re.fullmatch(r"`[^`]+`", part) for part in parts), f"line {line} is not all code: {cell}"
        for part in parts:
            run(part.strip("`"), line, namespace)
    EFFECTS[section.title](namespace)


def test_keys_of_the_code_generator_are_refused_with_their_place_here() -> None:
    assert GENERATOR.title == "The config of Ignite's code generator"
    least = {"task": "task.py:build", "run": {"max_epochs": 1}}
    rows = re.findall(r"^\| `(\w+): ([^`]+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, _, _ in rows} >= {*other_names.NAMES, *other_names.IN_WORDS, "max_epochs", "lr", "seed"}
    for name, value, cell in rows:
        with pytest.raises(ConfigError) as refused:
            config_from_dict({**least, name: yaml.safe_load(value)})
        named = cell.split("`")[1]
        if named.endswith("}"):
            values = yaml.safe_load(named)
            length = {} if "max_iterations" in named else least["run"]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                config_from_dict({**least, **values, "run": {**length, **values.get("run", {})}})
            assert any(f"{section}.{key}" in str(refused.value) for section in values for key in values[section]), name
        else:  # a file, or an option of a command
            assert re.split(r"[ N]", named)[0] in str(refused.value), name


# -- the effects of each table -----------------------------------------------------------------------------------------


def logged(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs", folder, "metrics.jsonl").read_text().splitlines()]


def saved(folder: str) -> list[str]:
    return sorted(path.name for path in Path("runs", folder, "checkpoints").glob("iteration_*"))


def iterations_with(key: str, folder: str) -> list[int]:
    return [line["iteration"] for line in logged(folder) if key in line]


def recipe(names: dict[str, Any]) -> None:
    state = names["state"]
    assert (state.iteration, state.micro_batches, state.status, state.reason) == (6, 24, "completed", "max_iters")
    assert iterations_with("loss", "recipe") == iterations_with("memory/host_rss_mib", "recipe") == [2, 4, 6]
    assert iterations_with("inputs", "recipe") == iterations_with("throughput/steps_per_s", "recipe") == [2, 4, 6]
    assert iterations_with("val/accuracy", "recipe") == iterations_with("name", "recipe") == [3, 6]
    assert saved("recipe") == [f"iteration_{number:08}" for number in (2, 4, 6)]
    assert names["resumed_from"] is None and list(Path("runs/recipe/tensorboard").iterdir())
    assert names["evaluator"].state.iteration == 4  # the last line evaluates the whole set


def hooks(names: dict[str, Any]) -> None:
    state, ids = names["state"], names["ids"]
    assert (state.iteration, state.reason) == (6, "max_epochs")
    epoch = ["EPOCH_STARTED", "EVALUATION_STARTED", "EPOCH_COMPLETED"]
    assert names["calls"] == ["before_train", *epoch, *epoch, "COMPLETED"]
    assert torch.equal(names["seen"].counts, 2.0 * torch.bincount(ids.flatten(), minlength=50))  # two epochs
    assert {"seen", "optimizer/dense", "optimizer/sparse"} <= set(names["trainer"].registry.objects)
    assert any("Embedding" in event.key for event in names["profiler"].key_averages())
    assert saved("hooks") == [f"iteration_{number:08}" for number in (2, 4, 6)]


def wrapper(names: dict[str, Any]) -> None:
    optimizer = names["optimizer"]
    # 12 batches by 4, and one more that was flushed
    assert (names["steps"], optimizer.optimizer_steps, optimizer.micro_batches) == (4, 4, 0)
    assert names["norm"] is None and names["scheduler"].scheduler.last_epoch == 4
    assert names["saved"]["scheduler"]["last_epoch"] == 4
    assert (names["state"].iteration, names["state"].micro_batches) == (3, 12)


def hf(names: dict[str, Any]) -> None:
    state = names["state"]
    assert (state.iteration, state.status, state.reason) == (5, "interrupted", "enough")
    assert iterations_with("loss", "hf") == [2, 4] and iterations_with("start/accuracy", "hf") == [0]
    assert saved("hf") and list(Path("runs/hf/clearml").rglob("metrics.jsonl"))
    assert logged("hf")[-1]["iteration"] >= 4


def lightning(names: dict[str, Any]) -> None:
    assert (names["state"].iteration, names["state"].epoch, names["own"].state.iteration) == (6, 2, 3)
    assert iterations_with("val/accuracy", "lightning") == [3, 6] and iterations_with(
        "often/accuracy", "lightning"
    ) == [4]
    assert {"averages", "ema", "early_stopping"} <= set(names["trainer"].registry.objects)
    assert iterations_with("inputs", "lightning") == [2, 4, 6] and iterations_with("sanity/accuracy", "lightning") == [
        0
    ]
    assert iterations_with("lr", "lightning") == [0, 2, 3, 4, 5, 6]


def accelerate(names: dict[str, Any]) -> None:
    state = names["state"]
    assert (state.iteration, state.optimizer_steps, state.reason) == (5, 5, "enough")
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(1e-4)  # a tenth of it after 2 and 4 steps
    assert saved("accelerate") == ["iteration_00000003", "iteration_00000005"]


def ignite(names: dict[str, Any]) -> None:
    state = names["state"]
    assert (state.iteration, state.epoch, state.status) == (6, 2, "completed")
    assert {"average", "val/accuracy"} <= set(state.metrics)
    assert saved("ignite") and iterations_with("loss", "ignite") == [2, 4, 6]


EFFECTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "A step recipe with mixins": recipe,
    "A hook trainer with TrainingArguments": hooks,
    "An accumulation wrapper": wrapper,
    "HF Trainer": hf,
    "Lightning": lightning,
    "Accelerate": accelerate,
    "Ignite's create_supervised_trainer": ignite,
}
