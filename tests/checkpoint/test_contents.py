"""What goes into a checkpoint comes out of it, bit for bit and of the same types; what could not is refused."""

import os
import sys
from collections import Counter, OrderedDict
from enum import Enum
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update, load_weights
from ignite_engine.checkpoint.digests import hashed
from ignite_engine.errors import CheckpointError
from tests.checkpoint.made_states import (
    CheckpointStore,
    attached,
    left_over,
    local_parts,
    manifest_of,
    record_of,
    run_to,
    save,
    shared_parts,
)
from tests.checkpoint.test_retention import read_bytes
from tests.kit.faults import FileOperations
from tests.kit.floors import of
from tests.kit.refusals import refuses
from tests.kit.tiny import linear, mse, numbers_loader

VALUES = {
    "none": None, "true": True, "large": 2**200, "float": 0.1, "complex": 1j, "bytes": b"\x00\xff", "text": "é",
    "nested": {"list": [1, (2, {3})], 7: "integer key", (1, "b"): 3, None: 4}, "ordered": OrderedDict(b=1, a=2),
    "counter": Counter("aab"), "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
    "nan": float("nan"), "minus zero": -0.0, "infinite": float("-inf"), "empty": {"list": [], "dict": {}, "tuple": ()},
}  # fmt: skip
TENSORS = {
    "bf16": torch.randn(5).bfloat16(),
    "fp16": torch.randn(5).half(),
    "fp8": torch.randn(5).to(torch.float8_e4m3fn),
    "int": torch.arange(5),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 4).t(),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "nan": torch.tensor([float("nan"), -0.0]),
    "sparse": torch.eye(3).to_sparse(),
    "parameter": nn.Parameter(torch.randn(100, 100)[:1], requires_grad=False),
    "large": torch.randn(700, 1000),
}


def bits(tensor):
    return tensor.detach().to_dense().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_data_comes_back_with_the_same_bits_and_types(tmp_path, mmap):
    store = CheckpointStore(tmp_path)
    path = store.save({"values": VALUES, "tensors": TENSORS}, {"own": [TENSORS["nan"]]}, iteration=1, epoch=0)
    loaded = CheckpointStore(tmp_path).load(path, mmap=mmap)
    back = loaded.shared["values"]
    assert repr(back) == repr(VALUES)
    assert [type(value) for value in back.values()] == [type(value) for value in VALUES.values()]
    for name, tensor in TENSORS.items():
        found = loaded.shared["tensors"][name]
        assert (type(found), found.dtype, found.shape) == (type(tensor), tensor.dtype, tensor.shape), name
        assert found.layout == tensor.layout and bits(found) == bits(tensor), name
        assert tensor.layout != torch.strided or found.stride() == tensor.stride(), name
    assert bits(loaded.local["own"][0]) == bits(TENSORS["nan"])


def test_tensors_that_are_one_are_one_again_and_a_view_is_alone(tmp_path):
    whole, flat = torch.randn(1000, 1000), torch.randn(6)
    model = {"loss": whole[0, 0], "row": whole[3:4], "column": whole[:, 1], "a": flat, "tied": flat}
    path = CheckpointStore(tmp_path).save({"model": model, "halves": [flat[:2], flat[2:]]}, {}, iteration=1, epoch=0)
    loaded = CheckpointStore(tmp_path).load(path).shared
    assert sum(each.stat().st_size for each in path.iterdir()) < 30_000
    assert all(torch.equal(loaded["model"][name], value) for name, value in model.items())
    assert loaded["model"]["a"].data_ptr() == loaded["model"]["tied"].data_ptr()
    loaded["model"]["a"].add_(1)
    assert torch.equal(torch.cat(loaded["halves"]), flat)


class Unit(Enum):
    METRE = "m"


class Scaled(torch.Tensor):
    """Made of two tensors, as torchao's states of optimizers are."""

    @staticmethod
    def __new__(cls, codes, scale, unit):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, unit):
        self.codes, self.scale, self.unit = codes, scale, unit

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.unit]

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, outer_size, outer_stride):
        return cls(tensors["codes"], tensors["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(str(function))  # nothing but its parts may be asked for


class Described(torch.Tensor):
    """A plain tensor with something beside it, as MONAI's are."""


@pytest.mark.parametrize("place", [{}, {"background": True}, *of("recovery", [{"memory": 1}])], ids=str)
def test_subclasses_of_tensors_come_back(tmp_path, place):
    class Kept:
        state = {
            "scaled": Scaled(torch.arange(5, dtype=torch.int8), torch.tensor(0.5), Unit.METRE),
            "described": torch.ones(2).as_subclass(Described),
        }

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    def made(kept):
        trainer, checkpoint = attached(tmp_path, **place)
        trainer.register("kept", kept)
        return trainer, checkpoint

    trainer, _ = made(Kept())
    trainer.run(numbers_loader(), max_iters=2)
    trainer, checkpoint = made(kept := Kept())
    kept.state = None
    checkpoint.resume()
    scaled = kept.state["scaled"]
    assert (
        type(scaled) is Scaled
        and scaled.codes.tolist() == [0, 1, 2, 3, 4]
        and (scaled.scale, scaled.unit) == (0.5, Unit.METRE)
    )
    assert kept.state["described"].tolist() == [1, 1]
    assert torch.equal(hashed(scaled), hashed(Kept.state["scaled"]))


@pytest.mark.parametrize("writers", [1, 3])
def test_the_manifest_says_all_of_it(tmp_path, writers):
    store = CheckpointStore(tmp_path)
    path = store.save(
        shared_parts(7, size=3000),
        local_parts(7),
        iteration=7,
        epoch=2,
        writers=writers,
        metrics={"val/loss": torch.tensor(0.5), "n": 3},
        reproducibility=["the loader has no state"],
        config={"run": {"seed": 1, "betas": (0.9, 0.95)}},
        labels=["kept by hand"],
        parent="iteration_00000003",
        healthy=False,
    )
    manifest = manifest_of(path)
    assert path == tmp_path / "iteration_00000007"
    expected = {"iteration": 7, "epoch": 2, "world_size": 1, "metrics": {"val/loss": 0.5, "n": 3.0}, "healthy": False}
    expected |= {"reproducibility": ["the loader has no state"], "config": {"run": {"seed": 1, "betas": [0.9, 0.95]}}}
    expected |= {"labels": ["kept by hand"], "parent": "iteration_00000003"}
    assert expected.items() <= manifest.items()
    assert sorted(part for parts in manifest["parts"].values() for part in parts if part == "rng") == ["rng"]
    assert manifest["versions"]["torch"] == torch.__version__ and manifest["created_at"].endswith("+00:00")
    assert manifest["environment"]["threads"] == torch.get_num_threads()
    assert manifest["environment"]["command"] == sys.argv
    assert manifest["files"] == {name: record_of(path / name) for name in manifest["files"]}
    assert sorted(os.listdir(path)) == ["manifest.json", *sorted(manifest["files"])]
    assert len(manifest["files"]) == (2 if writers == 1 else 3)
    assert torch.equal(store.load(path).shared["model"]["weight"], shared_parts(7, size=3000)["model"]["weight"])


def test_a_rank_that_did_not_exist_gets_the_shared_parts_and_no_local_ones(tmp_path):
    store = CheckpointStore(tmp_path)
    loaded = store.load(save(store, 1), rank=3)
    assert loaded.local == {} and loaded.shared["counters"] == {"iteration": 1}


def test_a_part_that_nobody_has_makes_no_file(tmp_path):
    path = CheckpointStore(tmp_path).save({"model": {}}, {}, iteration=1, epoch=0)
    assert len(os.listdir(path)) == 2 and CheckpointStore(tmp_path).load(path).local == {}


def test_what_changes_after_the_copy_is_not_in_a_background_save(tmp_path):
    """A handler changes all kinds of values while a writer waits for its first byte."""

    class Kept:
        def __init__(self):
            self.state = {"weight": torch.ones(2), "list": [1], "set": {1}, "bytes": bytearray(b"a")}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    trainer, checkpoint = attached(tmp_path, every=1, background=True)
    trainer.register("kept", kept := Kept())

    @trainer.on(Events.ITERATION_STARTED(once=2))
    def change():
        for change in (lambda: kept.state["weight"].zero_(), lambda: kept.state["list"].append(2)):
            change()
        kept.state["set"].add(2)
        kept.state["bytes"].extend(b"b")

    trainer.run(numbers_loader(), max_iters=2)
    first, second = (
        checkpoint.store.load(tmp_path / f"iteration_0000000{iteration}").local["kept"] for iteration in (1, 2)
    )
    assert first["weight"].tolist() == [1, 1] and second["weight"].tolist() == [0, 0]
    assert (first["list"], first["set"], bytes(first["bytes"])) == ([1], {1}, b"a")
    assert (second["list"], second["set"], bytes(second["bytes"])) == ([1, 2], {1, 2}, b"ab")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_a_checkpoint_with_one_weight_that_is_not_finite_is_not_healthy(tmp_path, dtype, bad):
    model = linear()
    model.register_buffer("table", torch.full((3, 4), 5e4).to(dtype))  # whose sum would overflow in fp16
    run_to(tmp_path / "good", 2, model=model)
    with torch.no_grad():
        model.table.copy_(torch.tensor([[0.0] * 11 + [bad]]).view(3, 4))
    run_to(tmp_path / "bad", 2, model=model)
    healthy = [manifest_of(tmp_path / name / "iteration_00000002")["healthy"] for name in ("good", "bad")]
    assert healthy == [True, False]


# ---------------------------------------------------------------------------------------------- what cannot be saved


def deep(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


def cyclic():
    state = {}
    state["again"] = {"self": state, "twice": state}
    return state


REFUSED = {
    "a path": ({"layers": [1, Path("runs")]}, {}, "model ['layers'][1] path"),
    "a module": ({"layers": [1, nn.Linear(1, 1)]}, {}, "model ['layers'][1] Linear"),
    "a generator": ({"own": torch.Generator()}, {}, "model Generator"),
    "a frozenset": ({"own": frozenset((1,))}, {}, "model frozenset"),
    "a tensor with an object": (
        {"own": Scaled(torch.ones(2), torch.ones(2), torch.Generator())},
        {},
        "model ['own'] Scaled exclude=['model:own']",
    ),
    "too deep": (deep(5000), {}, "deep"),
    "cyclic": (cyclic(), {}, "deep"),
    "a metric in words": ({}, {"metrics": {"val/loss": "low"}}, "'val/loss' str number"),
    "a tensor in the config": ({}, {"config": {"model": torch.ones(1)}}, "config JSON"),
}


@pytest.mark.parametrize(("state", "facts", "words"), REFUSED.values(), ids=list(REFUSED))
def test_what_could_not_be_loaded_is_refused_before_anything_is_written(tmp_path, state, facts, words):
    store = CheckpointStore(tmp_path)
    with FileOperations(tmp_path) as seen:
        refuses(lambda: store.save({"model": state}, {}, iteration=1, epoch=0, **facts), CheckpointError, words)
    assert "write" not in [operation for operation, _ in seen.seen]
    assert left_over(tmp_path) == [] and store.checkpoints() == []


def test_an_iteration_is_not_negative(tmp_path):
    refuses(lambda: save(CheckpointStore(tmp_path), -1), ValueError, "iteration at least 0 -1")


# ------------------------------------------------------------------------------------------------------ read only once


def test_a_resume_reads_each_file_once_and_others_once_more_to_choose_it(tmp_path):
    def made(name):
        model = nn.Sequential(nn.Linear(3, 1 << 18), nn.Linear(1 << 18, 1))
        trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.0), mse))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(loss=1.0))
        return attached(tmp_path / name, trainer=trainer, every=1, best="loss")

    trainer, checkpoint = made("run")
    trainer.run(numbers_loader(), max_iters=1)
    path = tmp_path / "run" / "iteration_00000001"
    size = sum(each["bytes"] for each in manifest_of(path)["files"].values())
    uses = {
        "resume": lambda: made("run")[1].resume(),
        "load": lambda: made("other")[1].load(tmp_path / "run"),
        "best": lambda: load_weights(trainer.update.model, tmp_path / "run", "best"),
        "restore_best": checkpoint.restore_best,
    }
    for name, use in uses.items():
        for file in path.iterdir():
            os.utime(file)  # nobody knows it any more
        before = read_bytes()
        use()
        assert size <= read_bytes() - before < (1.2 if name == "resume" else 2.2) * size, name
