"""What a device does not have; and what is said of it."""

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer
from ignite_engine.cli import main
from ignite_engine.handlers import MemoryLogger
from tests.device.training import DEVICE, net, trainer_of
from tests.kit.processes import child

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),  # the fake device's mse_loss
]


def has_not(*_, **__):
    raise NotImplementedError


def trained(lacks):
    if lacks:
        torch.Tensor.record_stream = has_not
    model, batches = net(DEVICE), [(torch.ones(4, 3) * at, torch.ones(4, 1)) for at in range(4)]
    trainer = trainer_of(model)
    MemoryLogger().attach(trainer)
    trainer.run(batches, max_epochs=1)
    return [parameter.tolist() for parameter in model.parameters()]


def test_a_kind_without_streams_gets_the_plain_way_to_the_same_weights():
    assert child(trained, True) == child(trained, False)


def test_memory_of_an_update_without_a_device_is_that_of_the_device_in_use():
    held = torch.ones(1000, device=DEVICE)
    trainer = Trainer(lambda engine, batch: {"loss": held.sum()})
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run([1, 2], max_epochs=1)
    assert trainer.state.metrics["memory/peak_mib"] > 0


def test_doctor_prints_what_is_here(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert DEVICE.type in said and "beside computing" in said
