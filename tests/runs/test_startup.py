"""The phases of a start are timed, from Python as from a config."""

import pytest
import torch

from ignite_engine import fit
from tests.kit.tiny import linear, mse


@pytest.mark.row("A11")
def test_phases_of_a_start_in_python_are_in_the_log_and_in_the_summary(tmp_path, caplog):
    data = (torch.ones(8, 3), torch.ones(8, 1))
    run = fit(linear(), mse, data, directory=tmp_path / "run", max_epochs=1, logging={"clearml": False})
    phases = run.summary["startup_s"]

    assert {"task", "model", "data", "trainer", "directory", "resume"} <= phases.keys()
    assert all(seconds >= 0 for seconds in phases.values())
    (line,) = [each for each in caplog.messages if each.startswith("Start-up took ")]
    shown = {record.getMessage(): getattr(record, "console", True) for record in caplog.records}
    assert shown[line] is (sum(phases.values()) >= 5)
    assert [phase for phase in phases if f" {phase} " in line] == [name for name, s in phases.items() if s >= 0.05]
