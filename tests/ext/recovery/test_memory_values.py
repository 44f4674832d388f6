"""A state that was copied into memory comes back as one that was written to disk does."""

import pickle
from collections import Counter, OrderedDict

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine.checkpoint.pack import unpacked
from ignite_engine.handlers import Checkpoint
from tests.ext.recovery.runs import KILLED, forget
from tests.kit.faults import kill_this_process
from tests.kit.processes import child, ended
from tests.kit.tiny import numbers_loader, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")
BASE, WHOLE = torch.arange(24.0).reshape(4, 6), torch.arange(8.0)
VALUES = {
    "transposed": BASE.t(),
    "strided": BASE[::2, 1::3],
    "empty": torch.empty(0, 3),
    "expanded": torch.ones(1).expand(5),
    "bf16": torch.arange(7.0).bfloat16(),
    "conjugate": torch.ones(3, dtype=torch.complex64).mul(1j).conj(),
    "negative bit": torch.ones(3, dtype=torch.complex64).mul(1j).conj().imag,
    "eight bits": torch.arange(5.0).to(torch.float8_e4m3fn),
    "NaN": torch.tensor([float("nan"), -0.0, float("inf")]),
    "sparse": torch.eye(3).to_sparse(),
    "sparse rows": torch.eye(3).to_sparse_csr(),
    "parameter": nn.Parameter(torch.ones(2)),
    "bytes": [bytearray(b"\0\1\2"), b"\xff"],
    "containers": (OrderedDict(b=1, a=2), Counter("abca"), {1, 2}, [], {}, (1, [2, {"deep": (None,)}])),
    "torch's own": (torch.Size((1, 2)), torch.bfloat16, torch.device("cpu")),
    "numbers": [1 + 2j, 1 << 80, True, None, 0.1],
    "tied": [BASE, BASE, BASE.view(-1), BASE.t()],
    "halves": [WHOLE[:4], WHOLE[4:]],
    "a view of a large one": torch.arange(1000.0)[:3],
}


class Holder:
    """An object whose state is VALUES."""

    found = None

    def state_dict(self):
        return VALUES

    def load_state_dict(self, state):
        self.found = {name: described(value) for name, value in state.items()}
        for name in ("tied", "halves"):
            addresses = [each.untyped_storage().data_ptr() for each in state[name]]
            self.found[f"{name}: shared"] = [addresses.index(address) for address in addresses]
        self.found["a small memory"] = state["a view of a large one"].untyped_storage().nbytes()


def described(value):
    """Types, structure and all bits, as a text."""
    if isinstance(value, torch.Tensor):
        facts = (type(value).__name__, value.dtype, value.shape, value.layout, value.requires_grad)
        strides = value.stride() if value.layout == torch.strided else None
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        return repr((facts, strides, dense.resolve_conj().resolve_neg().contiguous().view(-1).tolist()))
    if isinstance(value, dict):
        return repr((type(value).__name__, [(key, described(each)) for key, each in value.items()]))
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return repr((type(value).__name__, [described(each) for each in value]))
    return repr(value)


def resumed(folder, memory, dies):
    trainer, holder = trainer_of(), Holder()
    trainer.register("holder", holder)
    checkpoint = Checkpoint(folder, memory=memory)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(once=2))
    checkpoint.resume()
    if dies:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), kill_this_process)
        trainer.run(numbers_loader(), max_epochs=1)
    return trainer.state.iteration, holder.found


def test_each_value_comes_back_as_from_disk(tmp_path):
    found = {}
    for place, memory in (("disk", None), ("memory", 1)):
        assert ended(resumed, tmp_path / place, memory, True)[0] == KILLED
        at, found[place] = child(resumed, tmp_path / place, memory, False)
        assert at == (3 if memory else 2)
    forget(tmp_path)

    assert found["memory"] == found["disk"]
    compacted = {"strided", "expanded", "conjugate", "negative bit"}  # whose memory is another one
    for name in VALUES.keys() - compacted:
        assert found["memory"][name] == described(VALUES[name]), name
    assert found["memory"]["tied: shared"] == [0, 0, 2, 3] and found["memory"]["a small memory"] == 12


class Dangerous:
    def __reduce__(self):
        return (pytest.fail, ("executed",))


@pytest.mark.parametrize("content", [pickle.dumps(({}, Dangerous())), pickle.dumps(({}, eval)), b"no pickle", b""])
def test_nothing_in_memory_is_executed(content):
    room = memoryview(bytearray(len(content).to_bytes(8, "little") + content + bytes(64)))
    with pytest.raises((ValueError, KeyError)):
        unpacked(room)
