"""On a device whose tensors have no values: whatever reads one raises, with its file and line."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ignite_engine import devices
from tests.device.training import trainer_of
from tests.kit.tiny import mse

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda", 0)


def run(loss_fn=mse, **options):
    devices.side_stream(DEVICE)  # it is asked for by tensors with values
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(nn.Linear(3, 8, device=DEVICE), nn.Dropout(), nn.Linear(8, 1, device=DEVICE))
        trainer = trainer_of(model, loss_fn=loss_fn, **options)
        trainer.update.run_ended = lambda engine: None  # it reads the losses
        trainer.run([(torch.ones(4, 3), torch.ones(4, 1))] * 4, max_epochs=2)
    return trainer


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"log_grad_norm": True}], ids=str)
def test_neither_the_update_nor_the_loop_reads_a_value(precision, options):
    trainer = run(precision=precision, **options)
    assert trainer.state.iteration == 4 and trainer.state.optimizer_steps == 4


def test_a_read_would_raise():
    def reads(model, batch):
        loss = mse(model, batch)
        assert loss.item() >= 0
        return loss

    with pytest.raises(DataDependentOutputException):
        run(reads)
    with pytest.raises(DataDependentOutputException):
        run(lambda model, batch: mse(model, batch) if model(batch[0]).sum() > 0 else model(batch[0]).sum())
