"""How batches get to the model's device: in whatever holds them, one ahead of the one that is computed."""

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ignite_engine import Trainer, Update, create_evaluator
from tests.kit.tiny import linear

META = torch.device("meta")
ONE = torch.ones(1)
Pair = namedtuple("Pair", ["inputs", "name"])


@dataclass
class Sample:
    inputs: Tensor
    rest: list[Any]
    name: str = "a name"
    later: Tensor = field(init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    inputs: Tensor


class Graph:
    """Such as one of PyTorch Geometric: moved by a method of its own."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device):
        return Graph(self.nodes.to(device))


class Encoding(UserDict):
    """Such as one of Hugging Face: a mapping whose own ``to`` changes it in place."""

    def to(self, device):
        raise AssertionError("the host's batch would be changed")


def moved(batch, model=None):
    """What the loss function of a model on another device is given."""
    model, got = model or nn.Linear(1, 1, device=META), []

    def loss_fn(model, batch):
        got.append(batch)
        return model.weight.sum()

    Engine(Update(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)).run([batch])
    return got[0]


CONTAINERS = {
    "tensor": (ONE, lambda moved: moved),
    "dict": ({"a": ONE}, lambda moved: moved["a"]),
    "ordered": (OrderedDict(a=ONE), lambda moved: moved["a"]),
    "with a default": (defaultdict(list, a=ONE), lambda moved: moved["a"]),
    "read-only": (MappingProxyType({"a": ONE}), lambda moved: moved["a"]),
    "encoding": (Encoding(a=ONE), lambda moved: moved["a"]),
    "list": ([ONE, 1], lambda moved: moved[0]),
    "tuple": ((ONE, "b"), lambda moved: moved[0]),
    "deque": (deque([ONE]), lambda moved: moved[0]),
    "named tuple": (Pair(ONE, "b"), lambda moved: moved.inputs),
    "data class": (Sample(ONE, [ONE, 2]), lambda moved: moved.rest[0]),
    "frozen": (Frozen(ONE), lambda moved: moved.inputs),
    "graph": (Graph(ONE), lambda moved: moved.nodes),
    "packed": (pack_sequence([torch.ones(2), ONE]), lambda moved: moved.data),
    "no samples": ([torch.ones(0, 3)], lambda moved: moved[0]),
}


@pytest.mark.row("H4")
@pytest.mark.parametrize("name", CONTAINERS)
def test_tensors_are_moved_in_whatever_holds_them(name):
    batch, tensor_of = CONTAINERS[name]
    inside = moved({"batch": (batch, None)})["batch"][0]
    assert tensor_of(inside).device == META
    assert tensor_of(batch).device.type == "cpu"  # the host's is as it was
    if not isinstance(batch, Graph | PackedSequence):
        assert type(inside) is type(batch)
    if isinstance(batch, defaultdict):
        assert inside["missing"] == []


def test_what_is_no_tensor_stays_what_it_is():
    values = ["word", b"bytes", None, 3, 2.5, True, range(3), np.ones(2), {1, 2}, Tensor]
    assert all(new is old for new, old in zip(moved([*values, ONE]), values, strict=False))


def test_the_device_is_that_of_the_first_parameter_and_on_the_cpu_nothing_is_copied():
    batch = [ONE, {"a": ONE}]
    assert moved(batch, nn.Linear(1, 1)) is batch
    split = nn.Sequential(nn.BatchNorm1d(1, affine=False, device=META), nn.Linear(1, 1))
    split.weight = split[1].weight
    assert moved(ONE, split).device.type == "cpu"


class Watched:
    """A batch that says when it is moved."""

    def __init__(self, number, log):
        self.number, self.log = number, log

    def to(self, device):
        self.log.append(f"move {self.number}")
        return self


class Watching(Update):
    """Says what it computes; nothing can be read from its device at the end of a run."""

    def __init__(self, log):
        model = linear().to(META)

        def loss_fn(model, batch):
            log.append(f"compute {batch.number}")
            return model(torch.ones(2, 3, device=META)).mean()

        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    def run_ended(self, engine): ...


@pytest.mark.row("H4")
def test_each_is_moved_before_the_one_before_it_is_computed_and_none_beyond_the_update():
    log = []

    def batches():
        for number in range(5):
            log.append(f"load {number}")
            yield Watched(number, log)

    Trainer(Watching(log), 3).run(batches(), max_epochs=1)
    assert log == [
        *("load 0", "load 1", "load 2"),
        *("move 0", "move 1", "compute 0", "move 2", "compute 1", "compute 2"),
        *("load 3", "load 4", "move 3", "move 4", "compute 3", "compute 4"),
    ]  # fmt: skip
    log.clear()
    create_evaluator(linear().to(META), lambda model, batch: log.append(f"compute {batch.number}")).run(batches())
    assert log[:6] == ["load 0", "move 0", "compute 0", "load 1", "move 1", "compute 1"]
