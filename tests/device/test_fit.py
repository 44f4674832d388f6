"""What ``fit``, a config and the launcher do with a device: placing, settings, one device for each rank."""

from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy
from torch import nn

from ignite_engine import Parallel, fit
from tests.device.training import DEVICE, SECOND, Split, bits, same

pytestmark = pytest.mark.accelerator
INPUTS, LABELS = torch.arange(48.0).reshape(16, 3) / 48, torch.arange(16) % 3
is_fake = hasattr(torch.ops.fake_device, "counts")


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def fitted(folder, model=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)) if model is None else model
    arrays = (INPUTS, LABELS)
    return fit(
        model, loss_fn, arrays, arrays, directory=folder, max_epochs=2, batch_size=4,
        metrics={"accuracy": Accuracy()}, **options,
    )  # fmt: skip


@pytest.mark.row("N2")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fit_trains_on_the_device_and_evaluates_there(precision, tmp_path):
    run = fitted(tmp_path, precision=precision)
    assert next(run.trainer.update.model.parameters()).device == torch.device(DEVICE.type, 0)
    assert run.trainer.state.status == "completed" and 0 <= run.metrics["val/accuracy"] <= 1
    assert run.trainer.state.dataloader.pin_memory


def test_fit_resumes_to_the_same_bits(tmp_path):
    whole = bits(fitted(tmp_path / "whole").trainer.update.model)
    stopping = Events.ITERATION_COMPLETED(once=5), lambda trainer: trainer.request_stop("test")
    fitted(tmp_path / "cut", handlers=[Stop(*stopping)])
    torch.rand(9, device=DEVICE)
    assert same(bits(fitted(tmp_path / "cut").trainer.update.model), whole)


class Stop:
    def __init__(self, event, act):
        self.event, self.act = event, act

    def attach(self, trainer):
        trainer.add_event_handler(self.event, self.act)


def test_model_on_a_device_or_on_several_stays_there(tmp_path):
    run = fitted(tmp_path / "one", nn.Linear(3, 3).to(SECOND))
    assert {parameter.device for parameter in run.trainer.update.model.parameters()} == {
        torch.device(SECOND.type, SECOND.index)
    }

    split = Split(torch.device(DEVICE.type, 0), SECOND)
    run = fit(
        split,
        lambda model, batch: model(batch[0]).square().mean(),
        (INPUTS, LABELS),
        directory=tmp_path / "split",
        max_iters=2,
        batch_size=4,
    )
    assert run.trainer.update.model.upper.weight.device == SECOND


def _device_of_rank(local_rank, folder):
    (Path(folder) / f"{local_rank}.txt").write_text(str(torch.accelerator.current_device_index()))


def test_each_rank_takes_a_device(tmp_path):
    """The only one where there are no more."""
    with Parallel("gloo", nproc_per_node=2) as parallel:
        parallel.run(_device_of_rank, str(tmp_path))
    last = torch.accelerator.device_count() - 1
    assert [int((tmp_path / f"{rank}.txt").read_text()) for rank in range(2)] == [0, min(1, last)]
