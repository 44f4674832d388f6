"""The benchmark of formats compares equal work: each format restores what it was given. Contents, never times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoint_format


def test_every_format_is_timed_and_restores_the_same(tmp_path: Path) -> None:
    found = checkpoint_format.measure(2, 16, tmp_path)
    state = checkpoint_format.training_state(16)
    content = sum(tensor.numel() * tensor.element_size() for tensor in checkpoint_format._tensors(state))

    assert set(found) == set(checkpoint_format.FORMATS)
    assert all(len(each.write_s) == len(each.load_s) == 2 and each.bytes > content for each in found.values())
    assert list(tmp_path.iterdir()) == []


def test_format_that_restores_something_else_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
        found = checkpoint_format.read_torch(folder, state)
        found["model"]["0.bias"] = torch.zeros(16)
        return found

    pair = (checkpoint_format.write_torch, forgetful)
    monkeypatch.setattr(checkpoint_format, "FORMATS", {"torch.save": pair})
    with pytest.raises(RuntimeError, match=r"torch\.save did not restore what it was given"):
        checkpoint_format.measure(1, 16, tmp_path)


def test_only_torch_save_restores_all_plain_data_and_runs_no_code(tmp_path: Path) -> None:
    """The reasons for the chosen format; a failure means that torch or safetensors has changed."""
    table = checkpoint_format.holds(tmp_path)
    ours = table["torch.save"]

    assert ours.pop("code in a file") == "does not run" and set(ours.values()) == {"restored"}
    assert table["DCP"]["code in a file"] == "runs"
    assert table["safetensors"]["tuple"] == "changed" and table["safetensors"]["bytes"] == "refused"


def test_program_prints_both_tables_and_writes_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "numbers.json"
    assert checkpoint_format.main(["--rounds", "2", "--width", "16", "--json", str(target)]) == 0
    printed, report = capsys.readouterr().out, json.loads(target.read_text())

    assert "ours (torch.save, hashed, committed)" in printed and "code in a file" in printed
    assert report["formats"].keys() == checkpoint_format.FORMATS.keys()
