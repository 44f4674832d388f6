"""A run that is sharded one way is resumed in any other, on any number of ranks."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.sharded import run_phases, train, trainer_in

pytestmark = pytest.mark.distributed

# ranks, layout, and what else is special
SAVED = {
    "fsdp": (2, "fsdp", {}),
    "background": (2, "fsdp", {"background": True}),
    "sgd": (2, "fsdp", {"optimizer": "sgd"}),
    "adagrad": (2, "fsdp", {"optimizer": "adagrad"}),
    "ddp": (2, "ddp", {}),
    "plain": (1, "plain", {}),
    "hsdp": (4, "hsdp", {}),
    "tp": (2, "tp", {}),
    "tp+fsdp": (4, "tp+fsdp", {}),
}
SAME = list(SAVED)
OTHER = [
    ("fsdp", 1, "fsdp"),
    ("fsdp", 1, "plain"),
    ("fsdp", 2, "ddp"),
    ("fsdp", 3, "fsdp"),
    ("fsdp", 4, "fsdp"),
    ("fsdp", 4, "tp+fsdp"),
    ("background", 3, "fsdp"),
    ("sgd", 3, "fsdp"),
    ("adagrad", 1, "plain"),
    ("ddp", 2, "fsdp"),
    ("ddp", 4, "hsdp"),
    ("plain", 2, "fsdp"),
    ("plain", 2, "tp"),
    ("hsdp", 2, "fsdp"),
    ("hsdp", 3, "ddp"),
    ("tp", 1, "plain"),
    ("tp", 3, "fsdp"),
    ("tp+fsdp", 3, "fsdp"),
    ("tp+fsdp", 2, "tp"),
    ("tp+fsdp", 1, "plain"),
]


def uninterrupted(folder: Path, layout: str, options: dict[str, Any]) -> Any:
    trainer, _, data = trainer_in(layout, folder, **options)
    return train(trainer, data)


def resumed(source: Path, folder: Path, layout: str, options: dict[str, Any]) -> Any:
    """From the checkpoint of iteration 2, in the middle of an epoch."""
    if dist.get_rank() == 0:
        shutil.copytree(source / "iteration_00000002", folder / "iteration_00000002")
    dist.barrier()
    trainer, checkpoint, data = trainer_in(layout, folder, **options)
    assert checkpoint.resume() == folder / "iteration_00000002"
    return train(trainer, data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("runs")
    phases: dict[str, Any] = {
        name: (ranks, partial(uninterrupted, folder / name, layout, options))
        for name, (ranks, layout, options) in SAVED.items()
    }
    for name, ranks, layout in [*((name, *SAVED[name][:2]) for name in SAVED), *OTHER]:
        key = f"{name} -> {layout} {ranks}"
        phases[key] = (ranks, partial(resumed, folder / name, folder / key, layout, SAVED[name][2]))
    return folder, run_phases(folder, phases)


@pytest.mark.parametrize("name", SAME)
def test_on_the_same_ranks_and_layout_it_ends_with_the_same_bits(
    runs: tuple[Path, dict[str, list[Any]]], name: str
) -> None:
    _, answers = runs
    ranks, layout, _ = SAVED[name]
    for whole, again in zip(answers[name], answers[f"{name} -> {layout} {ranks}"], strict=True):
        assert list(again["losses"]) == [str(each) for each in range(3, 9)]
        assert again["losses"] == {iteration: whole["losses"][iteration] for iteration in again["losses"]}
        assert again["state"] == whole["state"] and len(whole["state"]) > 20


@pytest.mark.parametrize(("name", "ranks", "layout"), OTHER)
def test_on_other_ranks_or_another_layout_it_has_the_same_losses(
    runs: tuple[Path, dict[str, list[Any]]], name: str, ranks: int, layout: str
) -> None:
    _, answers = runs
    whole = answers[name][0]
    for again in answers[f"{name} -> {layout} {ranks}"]:
        assert list(again["losses"]) == [str(each) for each in range(3, 9)]
        assert again["losses"] == pytest.approx(
            {iteration: whole["losses"][iteration] for iteration in again["losses"]}, abs=1e-6
        )
        assert set(again["state"]) == set(whole["state"])


def test_each_piece_is_written_once(runs: tuple[Path, dict[str, list[Any]]]) -> None:
    """Of replicas (HSDP), and of what tensor parallel ranks do not split, one rank's."""
    folder, _ = runs
    written = {}
    for name in ("plain", "fsdp", "hsdp", "tp", "tp+fsdp"):
        content = json.loads((folder / name / "iteration_00000002" / "manifest.json").read_text())
        written[name] = sorted(each for each in content["files"] if each.startswith("shards"))
        assert content["format_version"] == (3 if written[name] else 2)
    assert written == {
        "plain": [],
        "fsdp": ["shards_0.pt", "shards_1.pt"],
        "hsdp": ["shards_0.pt", "shards_1.pt"],
        "tp": ["shards_0.pt", "shards_1.pt"],
        "tp+fsdp": [f"shards_{rank}.pt" for rank in range(4)],
    }
