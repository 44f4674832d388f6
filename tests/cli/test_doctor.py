"""``doctor`` says what a run here would use, as it does."""

import os
import subprocess
import sys

import pytest
import torch

from ignite_engine import devices
from ignite_engine.cli import doctor, main


def values():
    return {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in doctor.report())}


def test_report_names_versions_devices_and_what_is_used(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == doctor.report()
    found = values()
    assert found["torch"].startswith(str(torch.__version__)) and found["pytorch-ignite"] != "missing"
    assert found["cores"] == f"{os.cpu_count()}, of which torch uses {torch.get_num_threads()}"
    if not torch.accelerator.is_available():
        assert found["accelerators"] == "none" and found["models go to"].startswith("the CPU, as torch")
        assert found["several ranks"] == "gloo, with models on cpu"


def test_it_takes_nothing():
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "config.yaml"])


@pytest.mark.row("N2")
@pytest.mark.accelerator
def test_what_it_says_of_a_device_is_what_a_run_uses():
    found, device = values(), devices.current()
    side = devices.side_stream(device) is not None
    assert found["models go to"].startswith(str(device)) and found["accelerators"].startswith("0: ")
    assert found["batches"].startswith("pinned" if side else "each copy is waited for")
    assert found["sums"].startswith(str(devices.widest_float(device)).removeprefix("torch."))
    assert (found["memory/*"], found["time/*"]) == ("of the device", "of the device, by its events")


@pytest.mark.slow
def test_a_program_without_anything_else_can_ask():
    done = subprocess.run(
        [sys.executable, "-m", "ignite_engine", "doctor"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.startswith("ignite-engine"), done.stderr
