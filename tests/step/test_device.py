"""Where a model lives, and how batches get there."""

from __future__ import annotations

import torch
from torch import nn

from ignite_engine.step.device import device_of, to_device


def test_device_is_that_of_the_first_parameter_or_buffer() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1, device="meta"))

    assert device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")
    assert device_of(Buffered()) == torch.device("meta")
    assert device_of(nn.Tanh()) == torch.device("cpu")


def test_on_the_cpu_batches_are_the_loaders_own() -> None:
    batches = [torch.ones(1), torch.zeros(1)]

    assert to_device(batches, torch.device("cpu")) is batches


def test_nested_batches_are_moved_in_order() -> None:
    batches = [{"inputs": torch.ones(size), "rest": [torch.ones(1), (torch.ones(2), "word")]} for size in (1, 2)]
    moved = list(to_device(batches, torch.device("meta")))

    assert [len(each["inputs"]) for each in moved] == [1, 2]
    for each in moved:
        tensors = [each["inputs"], each["rest"][0], each["rest"][1][0]]
        assert all(tensor.device.type == "meta" for tensor in tensors) and each["rest"][1][1] == "word"
