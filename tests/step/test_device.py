"""Where a model lives, and how batches get there."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, devices, loader
from ignite_engine.ext.rank_invariant.invariant import RankInvariance
from ignite_engine.handlers.meters import Running
from ignite_engine.runs.mean_loss import mean_loss
from ignite_engine.step.device import device_of, mapped, to_device
from tests.kit.tiny import linear

META = torch.device("meta")


def test_device_is_that_of_the_first_parameter_or_buffer():
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(1, device="meta"))

    assert device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")
    assert device_of(Buffered()) == torch.device("meta")
    assert device_of(nn.Tanh()) == torch.device("cpu")


def test_on_the_cpu_batches_are_the_loaders_own():
    batches = [torch.ones(1), torch.zeros(1)]

    assert to_device(batches, torch.device("cpu")) is batches


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

    def to(self, device, *options, non_blocking=None):
        assert non_blocking is not None
        return Graph(self.nodes.to(device))


class OnlyDevice(Graph):
    def to(self, device):
        return Graph(self.nodes.to(device))


class Encoding(UserDict[str, Any]):
    """Such as one of Hugging Face: a mapping whose own ``to`` changes it in place."""

    def to(self, device):
        raise AssertionError("the host's batch would be changed")


ONE = torch.ones(1)
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
    "graph that takes a device only": (OnlyDevice(ONE), lambda moved: moved.nodes),
    "packed": (pack_sequence([torch.ones(2), ONE]), lambda moved: moved.data),
    "no samples": ([torch.ones(0, 3)], lambda moved: moved[0]),
}


@pytest.mark.row("H4")
@pytest.mark.parametrize("name", CONTAINERS)
def test_tensors_are_moved_in_whatever_holds_them(name):
    batch, tensor_of = CONTAINERS[name]
    outer = {"batch": (batch, None)}
    (moved,) = to_device([outer], META)
    inside = moved["batch"][0]
    assert tensor_of(inside).device == META
    assert tensor_of(batch).device.type == "cpu"  # the host's is as it was
    if not isinstance(batch, Graph | PackedSequence):
        assert type(inside) is type(batch)
    if isinstance(batch, defaultdict):
        assert inside["missing"] == []


@pytest.mark.parametrize(
    "value", ["word", b"bytes", None, 3, 2.5, True, range(3), np.ones(2), {1, 2}, [1, "b"], Tensor]
)
def test_what_is_no_tensor_stays_what_it_is(value):
    (moved,) = to_device([[value, torch.ones(1)]], META)
    assert moved[0] is value


def test_a_tensor_is_asked_for_once_and_in_order():
    asked = []
    batch = {"a": torch.tensor(1), "b": [torch.tensor(2), (torch.tensor(3),)]}
    mapped(batch, lambda tensor: asked.append(int(tensor)), lambda value: value)
    assert asked == [1, 2, 3]


class Watched:
    """A batch that says when it is moved, and can fail."""

    def __init__(self, number, log, fails=False):
        self.number, self.log, self.fails = number, log, fails
        self.inputs = torch.ones(2, 3)

    def to(self, device):
        self.log.append(f"move {self.number}")
        if self.fails:
            raise RuntimeError("no such device")
        moved = Watched(self.number, self.log)
        moved.inputs = self.inputs.to(device)
        return moved


class Stream:
    """Batches that say when they are loaded; a plain iterable, whose position the trainer counts."""

    def __init__(self, log, count=5, fails_at=None):
        self.log, self.count, self.fails_at = log, count, fails_at

    def __len__(self):
        return self.count

    def __iter__(self):
        for number in range(self.count):
            self.log.append(f"load {number}")
            yield Watched(number, self.log, number == self.fails_at)


def on_meta(log, accumulation_steps):
    model = linear().to("meta")

    def loss_fn(model, batch):
        log.append(f"compute {batch.number}")
        assert batch.inputs.device == META
        loss = model(batch.inputs).mean()
        return loss

    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    update.run_ended = lambda engine: None
    return Trainer(update, accumulation_steps)


@pytest.mark.row("H4")
def test_each_is_moved_before_the_one_before_it_is_computed_and_none_beyond_the_update():
    log = []
    trainer = on_meta(log, 3)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: log.append("step"))
    trainer.run(Stream(log))
    assert log == [
        *("load 0", "load 1", "load 2"),
        *("move 0", "move 1", "compute 0", "move 2", "compute 1", "compute 2", "step"),
        *("load 3", "load 4", "move 3", "move 4", "compute 3", "compute 4", "step"),
    ]  # fmt: skip
    log.clear()
    on_meta(log, None).run(Stream(log, 2))
    assert log == ["load 0", "move 0", "compute 0", "load 1", "move 1", "compute 1"]


def test_a_stop_leaves_nothing_moved_that_was_not_computed():
    log = []
    trainer = on_meta(log, 2)
    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED(once=3), lambda: trainer.request_stop("test"))
    trainer.run(Stream(log, 9))
    moved = [line.removeprefix("move ") for line in log if line.startswith("move")]
    computed = [line.removeprefix("compute ") for line in log if line.startswith("compute")]
    assert moved == computed == ["0", "1", "2", "3"]


def test_an_error_while_it_is_moved_names_the_iteration():
    log = []
    with pytest.raises(RuntimeError, match="no such device") as caught:
        on_meta(log, 2).run(Stream(log, 6, fails_at=3))
    assert caught.value.__notes__ == ["Raised while micro-batch 2 of iteration 2 was moved to meta."]


def test_evaluation_moves_each_batch_as_it_comes():
    log = []
    model = linear().to("meta")
    evaluator = create_evaluator(model, lambda model, batch: log.append(f"compute {batch.number}"))
    evaluator.run(Stream(log, 2))
    assert log == ["load 0", "move 0", "compute 0", "load 1", "move 1", "compute 1"]


@pytest.mark.cuda
def test_on_cuda_copies_from_pinned_memory_are_whole_and_overlap():
    device = torch.device("cuda", torch.cuda.current_device())
    side = 64 if "Fake" in torch.cuda.get_device_name() else 4096  # whose copies are late without work beside them
    host = [
        {"a": torch.full((side, side // 4), float(n)).pin_memory(), "g": OnlyDevice(torch.ones(3) * n)}
        for n in range(9)
    ]
    product = torch.randn(side, side, device=device)
    found = []
    for batch in to_device(host, device):
        for _ in range(20):
            product = product @ product / product.norm()  # the copies behind it are done meanwhile
        found.append((batch["a"] + 0.0 * product[:, : side // 4].nan_to_num(), batch["g"].nodes))
        del batch  # its memory is free for the next copy
    for number, (copied, nodes) in enumerate(found):
        assert torch.equal(copied, torch.full_like(copied, float(number)))
        assert torch.equal(nodes.cpu(), torch.ones(3) * number)


@pytest.mark.cuda
def test_on_cuda_a_run_is_resumed_at_every_position_to_the_same_bits(tmp_path):
    from ignite_engine.handlers import Checkpoint

    data = [(torch.randn(64, 3), torch.randn(64, 1)) for _ in range(7)]

    def train(until, name):
        model = linear().cuda()
        trainer = Trainer(
            Update(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: (m(b[0]) - b[1]).square().mean()), 3
        )
        checkpoint = Checkpoint(tmp_path / name)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
        checkpoint.resume()
        samples = [(a, b) for inputs, targets in data for a, b in zip(inputs, targets, strict=True)]
        trainer.run(loader(samples, 64, pin_memory=True), max_iters=until)
        return [each.detach().cpu() for each in model.parameters()]

    whole = train(6, "whole")
    for position in range(1, 6):
        train(position, str(position))
        assert all(torch.equal(a, b) for a, b in zip(train(6, str(position)), whole, strict=True))


class Device(TorchDispatchMode):
    """Makes ``meta`` a device without float64, and notes which copies to it were not waited for."""

    def __init__(self):
        super().__init__()
        self.non_blocking = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and kwargs.get("device") == META:
            self.non_blocking.append(kwargs.get("non_blocking", False))
        result = function(*args, **kwargs)
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.device == META and tensor.dtype is torch.float64:
                raise TypeError("Cannot convert a tensor to float64: the device has none.")
        return result


class Movable:
    """Not a tensor, and takes ``non_blocking``."""

    def __init__(self):
        self.non_blocking = None

    def to(self, device, non_blocking=False):
        self.non_blocking = non_blocking
        return self


def test_host_waits_for_a_copy_to_a_device_without_a_side_stream():
    """With one stream the copy may else be of what the loader writes there next."""
    movable = Movable()
    with Device() as device:
        list(to_device([torch.ones(2), {"a": torch.ones(2)}, movable], META))

    assert device.non_blocking == [False, False]
    assert movable.non_blocking is False


@contextmanager
def without_float64():
    devices.widest_float.cache_clear()
    with Device():
        yield
    devices.widest_float.cache_clear()


def test_widest_float_is_one_that_the_device_has():
    with without_float64():
        assert devices.widest_float(META) is torch.float32
    assert devices.widest_float(META) is devices.widest_float(torch.device("cpu")) is torch.float64


def running_sum(values):
    running = Running("mean")
    running.add(values, [1, 2])
    running.add(values, [3, 5])


def running_sum_of_different_types(values):
    Running("max").add([values[0], values[1].half()])


def mean_loss_of_a_batch(values):
    for weight in (0, 2):
        predict, _ = mean_loss(lambda model, batch: values[0], lambda batch, weight=weight: weight)
        predict(nn.Identity(), values)


def rank_invariant_values(values):
    sums = RankInvariance.__new__(RankInvariance)
    sums._names, sums._own, sums._scales, sums._device = ["loss"], range(2), [1.0, 0.5], META
    sums._products(values, [])
    sums._products([], [])


@pytest.mark.parametrize(
    "computed", [running_sum, running_sum_of_different_types, mean_loss_of_a_batch, rank_invariant_values]
)
def test_device_without_float64_is_asked_for_none(computed):
    values = [torch.ones((), device=META), torch.ones((), device=META)]
    with without_float64():
        computed(values)
