"""The commands of docs/mirror.md run: those of S3 on an S3 server of this machine, those of GCS there, too."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.docs.test_snippets import DOCS, blocks_of
from tests.faults.commands import Command
from tests.mirror.servers import CREDENTIALS, make_bucket, s3_server

TASK = """
import torch
from ignite_engine import Task

def build(options):
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(32, 2) / 64)
    loss = lambda model, batch: (model(batch[0]) - 1).square().mean()
    return Task(model=torch.nn.Linear(2, 1), loss_fn=loss, train_set=data, val_sets={"val": data})
"""
CONFIG = """
task: my_task.py:build
run: {directory: runs/my_run, max_iterations: 12}
data: {batch_size: 4}
checkpoint: {every: 4}
logging: {clearml: false, report: false}
"""
BLOCKS = {block.file: block.text for block in blocks_of(DOCS / "mirror.md") if block.language == "sh"}
NOT_RUN = ("pip", "export", "gcloud")
"""Other programs' own; the test sets what they would."""


@pytest.mark.slow
@pytest.mark.parametrize("title", ["directory", "S3", pytest.param("GCS", marks=pytest.mark.slow)])
def test_the_commands_run_and_the_run_comes_back(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "config.yaml").write_text(CONFIG)
    with s3_server() as port:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
            monkeypatch.setenv(name, value)
        make_bucket(port, "my-bucket")
        weights: list[str] = []
        said: list[str] = []
        for line in BLOCKS[title].splitlines():
            line = line.replace("/mnt/backup", str(tmp_path / "backup")).replace("gs://", "s3://")
            words = shlex.split(line)
            if words[0] in NOT_RUN:
                continue
            if words[0] == "rm":
                shutil.rmtree(tmp_path / words[2])
                continue
            assert words[:3] == ["python", "-m", "ignite_engine"], line
            command = Command(tmp_path, *words[3:])
            output, errors = command.communicate()
            assert command.returncode == 0, errors
            said.append(output + errors)
            if words[3] == "train":
                summary = json.loads((tmp_path / "runs" / "my_run" / "summary.json").read_text())
                assert summary["iteration"] == 12
                weights.append(summary["weights_sha256"])
    assert set(BLOCKS) == {"directory", "S3", "GCS"}
    assert len(weights) == 2 and weights[0] == weights[1]
    assert "Fetched iteration_00000012 from" in said[1] and "Resumed from" in said[1]
    assert "iteration_00000012" in said[-1]
