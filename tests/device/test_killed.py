"""A process that trains on a device is killed, and a fresh one ends with the same bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ignite_engine.checkpointing import CheckpointStore

pytestmark = pytest.mark.accelerator
ROOT = Path(__file__).resolve().parents[2]
ITERATIONS, KILLED_AT = 12, 7
PROGRAM = f"""
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch
from ignite.engine import Events
from ignite_engine import TrainingEvents, create_evaluator
from ignite_engine.handlers import Checkpoint, Evaluation
from ignite_engine.run_directory import weights_sha256
from tests.device.training import DEVICE, data, net, trainer_of

folder, event = sys.argv[1], sys.argv[2]
torch.manual_seed(0 if event != "resumed" else 5)  # a resumed process draws what was saved, not what it begins with
model = net(DEVICE, dropout=0.3)
assert next(model.parameters()).device.type == DEVICE.type != "cpu"
trainer = trainer_of(model)
torch.manual_seed(1 if event != "resumed" else 6)
evaluator = create_evaluator(model, lambda model, batch: model(batch[0]).mean(), {{}})
Evaluation(evaluator, data()).attach(trainer, Events.ITERATION_COMPLETED(every=3))
checkpoint = Checkpoint(folder, background=True)
checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
checkpoint.resume()

def die(trainer):
    if trainer.state.iteration == {KILLED_AT}:
        os.kill(os.getpid(), signal.SIGKILL)

if event == "killed":
    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED, die)
trainer.run(data(), max_iters={ITERATIONS})
torch.accelerator.synchronize()
print(weights_sha256(model), torch.rand(3, device=DEVICE).tolist())
"""


def run(folder, event, code=0):
    paths = [str(ROOT / "tests" / "device" / "startup"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", PROGRAM, str(folder), event]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr[-2000:]
    return done.stdout


def test_process_killed_with_dropout_on_the_device_resumes_to_the_bits_of_the_whole_run(tmp_path):
    whole = run(tmp_path / "whole", "none")
    run(tmp_path / "cut", "killed", -signal.SIGKILL)
    saved = [checkpoint.iteration for checkpoint in CheckpointStore(tmp_path / "cut").checkpoints()]
    assert saved and max(saved) < KILLED_AT
    assert run(tmp_path / "cut", "resumed") == whole
