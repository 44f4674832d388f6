"""What a device does not have, what cannot be moved or split, and where ranks do not reduce on it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_engine import Trainer, devices
from ignite_engine.checkpointing import Snapshot
from ignite_engine.cli import main
from ignite_engine.handlers import MemoryLogger
from ignite_engine.step.device import device_of, to_device
from tests.device.training import DEVICE, net, trainer_of

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),  # the fake device's mse_loss
]


@pytest.fixture
def asked_anew():
    devices._has.cache_clear()
    devices._said.clear()
    yield
    devices._has.cache_clear()


def has_not(*_, **__):
    raise NotImplementedError


@pytest.mark.usefixtures("asked_anew")
def test_a_kind_without_events_statistics_streams_and_autocast_gets_the_plain_way(monkeypatch, caplog):
    monkeypatch.setattr(torch, "Event", has_not)
    monkeypatch.setattr(torch.Tensor, "record_stream", has_not)
    monkeypatch.setattr(torch.accelerator, "memory_stats", has_not)
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: False)
    with caplog.at_level(logging.INFO, "ignite_engine.devices"):
        for _ in range(2):
            assert not devices.has_timing_events(DEVICE.type) and devices.side_stream(DEVICE) is None
            assert not devices.pins_memory() and devices.memory_statistics(DEVICE) == {}
            assert devices.autocast(DEVICE.type, torch.bfloat16) is None
    said = sorted(line.removeprefix(DEVICE.type).partition(":")[0] for line in caplog.messages)
    lacks = [
        "has no autocast",
        "has no count of its memory.",
        "has no events with a time.",
        "has no streams for copies beside computing.",
    ]
    assert said == [f" {words}" for words in lacks]


def test_a_run_takes_the_plain_way_to_the_same_weights(monkeypatch, asked_anew):
    def trained():
        model, batches = net(DEVICE), [(torch.ones(4, 3) * at, torch.ones(4, 1)) for at in range(4)]
        trainer = trainer_of(model)
        MemoryLogger().attach(trainer)
        trainer.run(batches, max_epochs=1)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    whole = trained()
    monkeypatch.setattr("ignite_engine.step.device._streams", {})
    monkeypatch.setattr(torch.Tensor, "record_stream", has_not)
    monkeypatch.setattr(torch.accelerator, "memory_stats", has_not)
    devices._has.cache_clear()
    assert all(torch.equal(*pair) for pair in zip(whole, trained(), strict=True))


def test_models_go_where_their_ranks_reduce(monkeypatch, caplog):
    devices._said.clear()
    assert devices.for_models() == devices.current() != torch.device("cpu")
    monkeypatch.setattr(devices.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(devices.dist, "get_world_size", lambda: 2)
    backends = dict.fromkeys(("here", "elsewhere"))
    monkeypatch.setattr(
        devices.dist.Backend, "backend_capability", {"here": [DEVICE.type], "elsewhere": ["cpu"], "nccl": [DEVICE.type]}
    )
    for backend in backends:
        monkeypatch.setattr(devices.dist, "get_backend", lambda backend=backend: backend)
        backends[backend] = devices.for_models().type
    assert backends == {"here": DEVICE.type, "elsewhere": "cpu"}
    assert f"Models stay on the CPU: the backend elsewhere does not reduce tensors on {DEVICE.type}." in caplog.messages
    monkeypatch.setattr(devices.dist.Backend, "default_device_backend_map", {DEVICE.type: "nccl"})
    monkeypatch.setattr(devices.dist, "is_backend_available", lambda backend: True)
    assert devices.default_backend() == "nccl" and devices.backend_is_usable("nccl")
    assert {kind.type for kind in devices.kinds_of_groups()} == {"cpu", DEVICE.type}


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    inputs: Tensor
    name: str = "a"


class Movable:
    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return Movable(self.tensor.to(device))


def test_batches_of_each_shape_are_moved():
    one = torch.arange(6.0).reshape(2, 3)
    batch = {
        "ordered": OrderedDict(inputs=one),
        "read only": MappingProxyType({"inputs": one}),
        "pair": Pair(one, "word"),
        "frozen": Frozen(one),
        "own": Movable(one),
        "others": [one, b"bytes", 3, None, ["no tensor"]],
        "half": (one.half(), float),
    }
    moved = next(iter(to_device([batch], DEVICE)))
    tensors = [
        *(moved["ordered"]["inputs"], moved["read only"]["inputs"], moved["pair"].first, moved["frozen"].inputs),
        *(moved["own"].tensor, moved["half"][0].float()),
    ]
    assert all(tensor.device.type == DEVICE.type and torch.equal(tensor.cpu(), one) for tensor in tensors)
    assert type(moved["ordered"]) is OrderedDict and type(moved["pair"]) is Pair and moved["frozen"].name == "a"
    assert moved["others"][1:] == [b"bytes", 3, None, ["no tensor"]] and moved["half"][1] is float
    assert moved["others"][4] is batch["others"][4] and batch["pair"].first is one
    assert device_of(nn.BatchNorm1d(2, affine=False).to(DEVICE)).type == DEVICE.type
    assert device_of(nn.ReLU()) == torch.device("cpu")


def test_a_snapshot_takes_what_is_no_plain_tensor():
    weight, sparse = torch.ones(4, device=DEVICE), torch.eye(3).to_sparse()
    state = {
        "weight": weight,
        "tied": weight,
        "meta": torch.ones(2, device="meta"),
        "sparse": sparse,
        "b": bytearray(2),
    }
    copied = Snapshot().take(state)
    torch.accelerator.synchronize()
    assert copied["tied"] is copied["weight"] is not weight and copied["meta"].is_meta
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3)) and copied["sparse"] is not sparse
    assert copied["b"] == bytearray(2) and copied["b"] is not state["b"]


def test_memory_of_an_update_without_a_device_is_that_of_the_device_in_use():
    held = torch.ones(1000, device=DEVICE)
    trainer = Trainer(lambda engine, batch: {"loss": held.sum()})
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run([1, 2], max_epochs=1)
    assert devices.in_use().type == DEVICE.type
    assert ("memory/peak_mib" in trainer.state.metrics) == devices.has_memory_statistics(DEVICE.type)


def test_doctor_prints_what_is_here(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert DEVICE.type in said and "beside computing" in said
