"""What each format can hold: the reasons for the chosen one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import checkpoint_format


def test_only_torch_save_restores_all_plain_data_and_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure means that torch or safetensors has changed."""
    table = checkpoint_format.holds(tmp_path)
    monkeypatch.setattr(checkpoint_format, "holds", lambda directory: table)
    assert checkpoint_format.main() == 0
    assert capsys.readouterr().out.count("\n") == 1 + len(table["torch.save"])
    ours = table["torch.save"]

    assert ours.pop("code in a file") == "does not run" and set(ours.values()) == {"restored"}
    assert table["DCP"]["code in a file"] == "runs"
    assert table["safetensors"]["tuple"] == "changed" and table["safetensors"]["bytes"] == "refused"
