"""A run on a device, ejected: the program places model and batches there, and ends with the same weights."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ignite_engine import rng
from ignite_engine.config import load_config
from ignite_engine.replay.eject import eject
from ignite_engine.runs import recipe

pytestmark = [pytest.mark.accelerator, pytest.mark.filterwarnings("ignore::ignite_engine.config.ConfigWarning")]
TASK = Path(__file__).resolve().parents[1] / "replay" / "features.py"

QUIET = [f"logging.{name}=false" for name in ("console", "progress", "memory", "throughput", "clearml", "report")]


@pytest.fixture
def deterministic_until_then() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("deterministic_until_then")
def test_ejected_run_trains_on_the_device_to_the_same_weights(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"task: {TASK}:build\ntask_options: {{losses: true}}\nrun: {{max_epochs: 2}}\n")
    overrides = [
        "data.batch_size=4",
        "update.accumulation_steps=2",
        f"update.precision={precision}",
        "run.deterministic=true",
    ]
    with rng.isolated():
        run = recipe.build_run(load_config(config, [*overrides, *QUIET, f"run.directory={tmp_path / 'run'}"]))
        run.train()

    text = eject(config, overrides)

    kind = torch.accelerator.current_accelerator()
    assert kind is not None and f'.to("{kind.type}")' in text
    assert 'os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG"' in text  # or cuBLAS refuses
    (tmp_path / "plain.py").write_text(text)
    capsys.readouterr()
    with rng.isolated():
        runpy.run_path(str(tmp_path / "plain.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == run.summary["weights_sha256"]
