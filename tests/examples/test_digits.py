"""The digits task: its splits, its augmentation, and the accuracy stated in its config."""

import json
import sys
from pathlib import Path

import pytest
import torch

from ignite_engine.cli import main
from ignite_engine.task import TaskError, build_task, find_task

ROOT = Path(__file__).resolve().parents[2]
build = find_task("digits.py:build", ROOT / "examples")
digits = sys.modules[build.__module__]


def as_set(images):
    return {image.numpy().tobytes() for image in images}


def test_splits_are_three_fifths_one_and_one_and_share_no_image():
    splits = digits.load_splits(0)
    sizes = {name: len(images) for name, (images, _) in splits.items()}
    sets = {name: as_set(images) for name, (images, _) in splits.items()}

    assert sizes == {"test": 359, "val": 359, "train": 1079} and sum(sizes.values()) == 1797
    assert not (sets["test"] & sets["val"] or sets["test"] & sets["train"] or sets["val"] & sets["train"])
    for images, targets in splits.values():
        assert images.shape[1:] == (1, 8, 8) and images.min() == 0.0 and images.max() == 1.0
        assert sorted(set(targets.tolist())) == list(range(10))


def test_splits_are_a_function_of_their_own_seed():
    torch.manual_seed(1)
    first = digits.load_splits(0)["test"][0]
    torch.manual_seed(2)

    assert torch.equal(first, digits.load_splits(0)["test"][0])
    assert not torch.equal(first, digits.load_splits(1)["test"][0])


def test_training_images_are_rotated_at_random_and_the_others_never():
    task = build_task(build, {})
    original = digits.load_splits(0)
    torch.manual_seed(0)
    first, second = (task.train_set[3][0] for _ in range(2))
    torch.manual_seed(0)
    again = task.train_set[3][0]

    assert torch.equal(first, again) and not torch.equal(first, second) and first.shape == (1, 8, 8)
    assert (first - original["train"][0][3]).abs().mean() < 0.15  # rotated a little, and upright
    for name, dataset in {**task.val_sets, **task.test_sets}.items():
        assert all(torch.equal(dataset[index][0], original[name][0][index]) for index in range(5))
    still = build_task(build, {"rotation": 0.0})
    assert torch.equal(still.train_set[3][0], original["train"][0][3])


def test_an_image_turned_by_a_right_angle_is_the_image_turned(monkeypatch):
    images = digits.load_splits(0)["test"][0]
    turned = digits.Digits(images, torch.zeros(len(images)), rotation=90.0)
    monkeypatch.setattr(torch, "rand", lambda *_: torch.ones(()))  # the largest angle

    torch.testing.assert_close(turned[0][0], torch.rot90(images[0], 1, (1, 2)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"width": 12}, "width must be a multiple of 8, got 12."),
        ({"rotation": -1.0}, "rotation must be at least 0 degrees, got -1.0."),
    ],
)
def test_option_that_cannot_be_is_refused(options, line):
    with pytest.raises(TaskError, match=line):
        build_task(build, options)


@pytest.mark.long  # trains the whole config
def test_best_checkpoint_reaches_the_promised_accuracy_on_the_test_fifth(tmp_path, capsys):
    arguments = [str(ROOT / "configs" / "digits.yaml"), f"run.directory={tmp_path}/run", "logging.progress=false"]
    assert main(["train", *arguments]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    capsys.readouterr()
    assert main(["evaluate", *arguments, "--checkpoint", "best"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = max(row["val/accuracy"] for row in rows)

    assert summary["status"] == "completed" and summary["reason"].startswith("early stopping: val/accuracy")
    assert result["iteration"] == next(row["iteration"] for row in rows if row["val/accuracy"] == best)
    assert result["val/accuracy"] == best and "test/accuracy" not in summary["metrics"]
    assert result["test/accuracy"] >= 0.975
