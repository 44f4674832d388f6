"""What ``fit``, a config and the launcher do with a device: placing, settings, one device for each rank."""

from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy
from torch import nn

from ignite_engine import devices, fit
from ignite_engine.checkpointing.environment import environment_values, inexact_reasons
from ignite_engine.ranks.launch import Parallel
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


def test_environment_names_the_devices():
    saved = environment_values(1)
    assert len(saved["devices"]) == torch.accelerator.device_count()
    assert inexact_reasons(saved, saved | {"devices": []})[0].startswith("devices: ")


def test_matmul_precision_is_of_convolutions_too():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        devices.set_matmul_precision("high")
        assert torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
        devices.set_matmul_precision("highest")
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _device_of_rank(local_rank, folder):
    index = torch.accelerator.current_device_index()
    (Path(folder) / f"{local_rank}.txt").write_text(f"{index} {devices.current()} {devices.for_models().type}")


def test_each_rank_takes_a_device(tmp_path):
    count = torch.accelerator.device_count()
    backend = devices.default_backend() if count > 1 else "gloo"  # whose ranks may share the only device
    with Parallel(backend, nproc_per_node=2) as parallel:
        parallel.run(_device_of_rank, str(tmp_path))
    kind = DEVICE.type if devices.backend_reduces_on(backend, DEVICE.type) else "cpu"
    for rank in range(2):
        index = min(rank, count - 1)
        assert (tmp_path / f"{rank}.txt").read_text() == f"{index} {DEVICE.type}:{index} {kind}"


def test_rank_without_a_device_is_refused_where_ranks_reduce_on_devices():
    count = torch.accelerator.device_count()
    if count > 1:
        with pytest.raises(ValueError, match=f"local rank {count} has no device: this machine has {count}"):
            devices.set_current(count, "gloo")
    devices.set_current(0, "gloo")
    assert torch.accelerator.current_device_index() == 0


def test_ranks_of_gloo_share_the_only_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "current", lambda: torch.device("cuda", 0))
    devices.set_current(1, "gloo")
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(ValueError, match="local rank 1 has no device: this machine has 1"):
            devices.set_current(1, backend)
