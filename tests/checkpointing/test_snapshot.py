"""A snapshot is a copy that training cannot change, with the memory layout of its source."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_engine.checkpointing import Snapshot, snapshot
from ignite_engine.checkpointing.threads import in_threads


def taken(snapshot, state):
    copy = snapshot.take(state)
    snapshot.wait()
    return copy


def test_buffers_are_used_again():
    snapshot, weight = Snapshot(), torch.ones(3)
    state = {"a": weight, "same": weight, "rest": [1, "x", (None, torch.zeros(2))]}
    first = taken(snapshot, state)
    assert torch.equal(first["a"], weight) and first["same"] is first["a"] and first["a"] is not weight
    weight.add_(1)
    second = taken(snapshot, state)
    assert second["a"].data_ptr() == first["a"].data_ptr() and second["a"].tolist() == [2.0, 2.0, 2.0]


def test_what_is_changed_after_the_copy_is_not_in_it():
    snapshot = Snapshot()
    state = {"weight": torch.ones(2), "list": [1], "set": {1}, "bytes": bytearray(b"a")}
    copy = taken(snapshot, state)
    state["weight"].zero_()
    state["list"].append(2)
    state["set"].add(2)
    state["bytes"].extend(b"b")
    assert copy["weight"].tolist() == [1.0, 1.0]
    assert (copy["list"], copy["set"], copy["bytes"]) == ([1], {1}, bytearray(b"a"))


LAYOUTS = {
    "transposed": torch.randn(5, 3).t(),
    "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "scalar": torch.tensor(2.0),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_has_the_strides_of_its_source(layout):
    source = LAYOUTS[layout]
    copy = taken(Snapshot(), [source])[0]
    assert torch.equal(copy, source) and copy.stride() == source.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_training_waits_for_is_copied_by_several_threads(layout, monkeypatch):
    pieces = []

    def recorded(work, items, threads):
        pieces.extend(items)
        return in_threads(work, items, threads)

    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 16)
    monkeypatch.setattr(snapshot, "in_threads", recorded)
    source = LAYOUTS[layout]
    copy = taken(Snapshot(), [source])[0]
    assert torch.equal(copy, source) and copy.stride() == source.stride()
    assert len(pieces) == (len(source) if source.nbytes > 16 else 0)


@pytest.mark.parametrize("source", [torch.arange(12.0)[::3], torch.ones(1).expand(5), torch.zeros(1000)[3:5]])
def test_a_view_is_copied_without_the_memory_around_it(source):
    copy = taken(Snapshot(), [source])[0]
    assert torch.equal(copy, source) and copy.untyped_storage().nbytes() == source.numel() * 4


def test_other_layouts_and_types_are_copied_at_once():
    sparse = torch.eye(3).to_sparse()
    parameter = nn.Parameter(torch.ones(2))
    copy = taken(Snapshot(), [sparse, parameter, torch.ones(2, dtype=torch.bfloat16)])
    assert torch.equal(copy[0].to_dense(), torch.eye(3)) and copy[1].tolist() == [1.0, 1.0]
    assert copy[2].dtype == torch.bfloat16


def test_a_state_dict_keeps_its_versions():
    state = nn.BatchNorm1d(2).state_dict()
    assert isinstance(state, OrderedDict) and state._metadata
    assert taken(Snapshot(), state)._metadata == state._metadata


class Copies(TorchDispatchMode):
    """Whether each copy into a tensor was let run on while the host went on."""

    def __init__(self):
        super().__init__()
        self.non_blocking = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.non_blocking.append(args[2] if len(args) > 2 else bool((kwargs or {}).get("non_blocking")))
            return args[0]  # from a device without data nothing can be copied
        return function(*args, **(kwargs or {}))


def test_copy_from_a_device_without_events_is_waited_for():
    """With one stream nothing would say when the bytes are there: wrong weights with valid hashes."""
    source = torch.ones(3, device="meta")
    with Copies() as copies:
        own = Snapshot()
        own._pairs = [(torch.zeros(3), source)]
        own._copy_values()

    assert copies.non_blocking == [False]
