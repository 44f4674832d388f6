"""A state that was packed into memory comes back as one that was written to disk does."""

import io
import mmap
import pickle
import random
from collections import Counter, OrderedDict

import pytest
import torch
from torch import Tensor, nn

from ignite_engine.checkpointing import CheckpointError
from ignite_engine.checkpointing.part_file import read_parts, write_parts
from ignite_engine.ext.recovery.packing import Packed, unpack
from tests.kit.tiny import linear


def through_memory(parts, facts=None):
    packed = Packed(facts or {}, parts)
    room = memoryview(mmap.mmap(-1, packed.bytes + 100))
    packed.write(room)
    return unpack(room)


def through_disk(parts, path):
    path.unlink(missing_ok=True)
    return read_parts(path, write_parts(path, parts))


def same(one, other):
    """Type, structure and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if (one.dtype, one.shape, one.layout, one.requires_grad) != (
            other.dtype, other.shape, other.layout, other.requires_grad,
        ):  # fmt: skip
            return False
        if one.layout == torch.strided and one.stride() != other.stride():
            return False
        saved = [io.BytesIO(), io.BytesIO()]
        for value, file in zip((one, other), saved, strict=True):
            torch.save(value.detach().to_dense().contiguous().clone(), file)
        return saved[0].getvalue() == saved[1].getvalue()
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(a == b and same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def memories_of(parts):
    """For each tensor, in order, the first one with the same memory."""
    addresses = [value.untyped_storage().data_ptr() for value in parts.values()]
    return [addresses.index(address) for address in addresses]


BASE = torch.arange(24.0).reshape(4, 6)
VALUES = {
    "transposed": lambda: BASE.t(),
    "strided": lambda: BASE[::2, 1::3],
    "one element": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "expanded": lambda: torch.ones(1).expand(5),
    "bf16": lambda: torch.randn(7).bfloat16(),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative bit": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "booleans": lambda: torch.tensor([True, False]),
    "eight bits": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "NaN": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "parameter": lambda: nn.Parameter(torch.randn(2)),
    "frozen parameter": lambda: nn.Parameter(torch.randn(2), requires_grad=False),
    "needs a gradient": lambda: torch.randn(2, requires_grad=True),
    "bytearray": lambda: bytearray(b"\0\1\2"),
    "bytes": lambda: b"\xff",
    "ordered": lambda: OrderedDict(b=1, a=2),
    "counter": lambda: Counter("abca"),
    "set": lambda: {1, "two"},
    "complex number": lambda: 1 + 2j,
    "size, type, device": lambda: (torch.Size((1, 2)), torch.bfloat16, torch.device("cpu")),
    "large number": lambda: 1 << 80,
    "keys": lambda: {1: "a", (2, "b"): None, 2.5: True, b"c": {}},
    "nothing": lambda: {},
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_from_disk(name, tmp_path):
    parts = {"part": {"value": VALUES[name]()}}

    _, found = through_memory(parts)

    assert same(found, through_disk(parts, tmp_path / "parts.pt"))
    assert same(found, parts) or name in ("strided", "expanded", "conjugate", "negative bit")  # which are compacted


def drawn(rng, depth=0):
    kind = rng.randrange(6 if depth < 3 else 3)
    if kind == 0:
        return rng.choice([None, True, rng.random(), rng.getrandbits(70), "text", b"bytes"])
    if kind < 3:
        return VALUES[rng.choice(list(VALUES))]()
    if kind == 3:
        return [drawn(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 4:
        return tuple(drawn(rng, depth + 1) for _ in range(rng.randrange(3)))
    return {rng.choice(["a", 1, "b", (2, 3)]): drawn(rng, depth + 1) for _ in range(rng.randrange(4))}


def test_drawn_states_come_back_as_from_disk(tmp_path):
    for seed in range(60):
        rng = random.Random(seed)
        parts = {"one": drawn(rng), "two": {"deep": drawn(rng)}}

        _, found = through_memory(parts)

        assert same(found, through_disk(parts, tmp_path / "parts.pt")), seed


def test_tensors_share_memory_as_they_do_from_disk(tmp_path):
    base, whole = torch.randn(6, 4), torch.randn(8)
    parts = {
        "tied": {"a": base, "b": base, "c": base.view(-1), "d": base.t()},
        "views of a large one": {"a": torch.randn(1000)[:3], "b": whole[:4], "c": whole[4:]},
    }

    _, found = through_memory(parts)

    read = through_disk(parts, tmp_path / "parts.pt")
    for part in parts:
        assert memories_of(found[part]) == memories_of(read[part])
    assert found["tied"]["a"] is found["tied"]["b"]
    assert found["views of a large one"]["a"].untyped_storage().nbytes() == 12


def test_what_is_read_has_a_memory_of_its_own():
    packed = Packed({}, {"part": {"value": torch.ones(3)}})
    room = memoryview(mmap.mmap(-1, packed.bytes))
    packed.write(room)
    _, parts = unpack(room)

    room[:] = bytes(len(room))

    assert parts["part"]["value"].tolist() == [1, 1, 1]


def test_states_of_a_model_and_its_optimizer_and_facts_come_back():
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()

    facts, parts = through_memory(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, {"metrics": {"loss": 0.5}}
    )

    assert facts == {"metrics": {"loss": 0.5}}
    assert same(dict(parts["model"]), dict(model.state_dict()))
    assert same(parts["optimizer"], optimizer.state_dict())


def test_what_a_checkpoint_cannot_hold_is_refused():
    with pytest.raises(CheckpointError, match=r"part\['value'\] is a builtins.object"):
        Packed({}, {"part": {"value": object()}})


class Dangerous:
    def __reduce__(self):
        return (pytest.fail, ("executed",))


@pytest.mark.parametrize("content", [pickle.dumps(({}, Dangerous())), pickle.dumps(({}, eval)), b"no pickle", b""])
def test_nothing_in_memory_is_executed(content):
    room = memoryview(bytearray(len(content).to_bytes(8, "little") + content + bytes(64)))

    with pytest.raises(CheckpointError, match="is not the state of a run"):
        unpack(room)
