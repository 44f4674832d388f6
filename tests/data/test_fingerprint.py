"""Other data of the same size is noticed on a resume; the same data is not, wherever it lies."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset

from ignite_engine import Windows, loader
from ignite_engine.checkpointing import NotExact
from ignite_engine.data.fingerprint import fingerprint
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import Numbers, linear, trainer_of


class Arrays(Dataset[Any]):
    def __init__(self, columns):
        self.columns = columns


class Files(Dataset[Any]):
    """Opened in the workers; what is drawn and counted is its own."""

    def __init__(self, *paths):
        self.samples = [(path, number % 2) for number, path in enumerate(paths)]
        self.opened = []
        self.generator = random.Random(0)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        raise AssertionError("no sample is read")


def values(shift, dtype=torch.float32):
    return (torch.arange(12).reshape(6, 2) + shift).to(dtype)


def changed(data, where, value):
    data[where] = value
    return data


OTHERS = {
    "list": lambda n: [(values(n)[0], 1), (values(0)[1], 2)],
    "last of a list": lambda n: [1, 2, 3, n],
    "middle text": lambda n: ["a", "b", f"c{n}", "d", "e"],
    "tensors": lambda n: TensorDataset(values(0), values(n)),
    "bf16": lambda n: TensorDataset(values(n, torch.bfloat16)),
    "complex": lambda n: TensorDataset(values(n).to(torch.complex64) * 1j),
    "stack": lambda n: StackDataset(x=values(n), y=values(0)),
    "subset": lambda n: Subset(TensorDataset(values(0)), [0, 1 + n]),
    "inside a subset": lambda n: Subset(TensorDataset(values(n)), [0, 1]),
    "concatenated": lambda n: ConcatDataset([TensorDataset(values(0)), TensorDataset(values(n))]),
    "end of a tensor": lambda n: TensorDataset(changed(torch.zeros(5000, 3), slice(4999, None), n)),
    "label of a tensor": lambda n: TensorDataset(changed(torch.zeros(5000, dtype=torch.int64), slice(3210, 3211), n)),
    "a part of a large tensor": lambda n: TensorDataset(
        changed(torch.zeros(3_000_000), slice(2_000_000, 2_060_000), n)
    ),
    "a part of a large array": lambda n: Arrays({"x": changed(np.zeros((700_000, 4)), slice(500_000, 515_000), n)}),
    "a part of a transposed tensor": lambda n: TensorDataset(
        changed(torch.zeros(3, 700_000, dtype=torch.bfloat16).T, slice(500_000, 560_000), n)
    ),
    "type": lambda n: TensorDataset(values(0, [torch.float32, torch.float64][n])),
    "one of many samples": lambda n: [(number, n if number == 77 else 0) for number in range(100)],
    "array": lambda n: Arrays({"x": np.arange(6) + n}),
    "numbers": lambda n: Numbers(6 + n),
    "file names": lambda n: Files("/data/cats/1.png", f"/data/cats/{n + 2}.png"),
    "loader": lambda n: loader(TensorDataset(values(n)), 2).dataset,
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_data_has_another_fingerprint(case):
    make = OTHERS[case]
    assert fingerprint(make(0)) == fingerprint(make(0)) is not None
    assert fingerprint(make(0)) != fingerprint(make(1))


def test_data_that_moved_or_counts_is_the_same():
    data = Files("/a/1.png", "/a/2.png")
    before = fingerprint(data)
    data.opened.append(3)
    assert fingerprint(data) == fingerprint(Files("/elsewhere/1.png", "/elsewhere/2.png")) == before


@pytest.mark.parametrize("data", [object(), [], range(3), Subset([], []), [object()] * 2, torch.ones(3).to_sparse()])
def test_what_cannot_be_told_is_no_error(data):
    fingerprint(data)


def _run(folder, data, *, iterations, strict=False):
    trainer, checkpoint = trainer_of(linear()), Checkpoint(folder, strict=strict)
    checkpoint.attach(trainer)
    checkpoint.resume()
    trainer.run(data, max_iters=iterations)
    return trainer


@pytest.mark.parametrize("kind", ["loader", "sampler of one's own", "windows"])
def test_a_run_resumed_with_other_data_of_the_size_says_so(tmp_path, caplog, kind):
    def data(shift):
        dataset = TensorDataset(Numbers(12).inputs + shift, Numbers(12).targets)
        if kind == "windows":
            return Windows([1, 2], lambda name: loader(dataset, 2))
        return loader(dataset, 2) if kind == "loader" else DataLoader(dataset, 2, sampler=[*range(12)])

    _run(tmp_path, data(0), iterations=2)
    same = _run(tmp_path, data(0), iterations=3)
    assert not [each for each in same.reproducibility() if "other" in each] and "other data" not in caplog.text

    caplog.clear()
    trainer = _run(tmp_path, data(1), iterations=4)
    lines = [each.getMessage() for each in caplog.records if each.name == "ignite_engine.data.source"]
    assert [line for line in lines if "place" in line] == [
        "The data is not that of the checkpoint: the run continues at its place in other data."
    ]
    assert len([each for each in trainer.reproducibility() if "other data" in each]) == 1
    if kind == "loader":
        with pytest.raises(NotExact, match="is not that of the checkpoint"):
            _run(tmp_path, data(0), iterations=5, strict=True)


def test_a_run_that_continues_in_the_process_may_have_changed_its_data(tmp_path, caplog):
    dataset = Numbers(12)
    data, trainer = loader(dataset, 2), trainer_of(linear())
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.request_stop("a test"))
    trainer.run(data, max_iters=4)
    dataset.targets += 1
    trainer.run(data, max_iters=4)
    assert trainer.state.iteration == 4 and "other data" not in caplog.text and trainer.reproducibility() == []
