"""Other data of the same size is noticed on a resume; the same data is not, wherever it lies."""

import random

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import ignite_engine
from ignite_engine import Trainer, loader
from ignite_engine.errors import NotExact
from ignite_engine.handlers import Checkpoint
from tests.kit.floors import of


class Arrays(Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.columns["x"][index]


class Files(Dataset):
    """What is opened, drawn and counted is its own."""

    def __init__(self, *paths):
        self.samples, self.generator = [(path, number % 2) for number, path in enumerate(paths)], random.Random(0)
        self.opened = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.opened.append(index)
        return self.generator.random()


def values(shift, dtype=torch.float32):
    return (torch.arange(12).reshape(6, 2) + shift).to(dtype)


def changed(data, where, value):
    data[where] = value
    return data


OTHERS = {
    "list of numbers": lambda n: [0, 1 + n],
    "list": lambda n: [(values(n)[0], 1), (values(0)[1], 2)],
    "middle text": lambda n: ["a", "b", f"c{n}", "d", "e"],
    "tensors": lambda n: TensorDataset(values(0), values(n)),
    "bf16": lambda n: TensorDataset(values(n, torch.bfloat16)),
    "subset": lambda n: Subset(TensorDataset(values(0)), [0, 1 + n]),
    "inside a subset": lambda n: Subset(TensorDataset(values(n)), [0, 1]),
    "label of a tensor": lambda n: TensorDataset(changed(torch.zeros(5000, dtype=torch.int64), slice(3210, 3211), n)),
    "part of a large tensor": lambda n: TensorDataset(changed(torch.zeros(3_000_000), slice(2_000_000, 2_060_000), n)),
    "part of a large array": lambda n: Arrays({"x": changed(np.zeros((700_000, 4)), slice(500_000, 515_000), n)}),
    "part of a transposed tensor": lambda n: TensorDataset(
        changed(torch.zeros(3, 700_000, dtype=torch.bfloat16).T, slice(500_000, 560_000), n)
    ),
    "type": lambda n: TensorDataset(values(0, [torch.float32, torch.float64][n])),
    "one of many samples": lambda n: [(number, n if number == 77 else 0) for number in range(100)],
    "file names": lambda n: Files("/data/cats/1.png", f"/data/cats/{n + 2}.png"),
}
SAME = {
    "moved files": lambda n: Files(f"/{n}/1.png", f"/{n}/2.png"),
    **{name: lambda n, make=make: make(0) for name, make in OTHERS.items()},
    "cannot be told": lambda n: [object()] * 2,
    "range": lambda n: range(3),
}


def resumed(folder, data, iterations, **options):
    """The reasons that a run gives which goes on in the folder with these data."""
    trainer, checkpoint = Trainer(lambda engine, batch: None), Checkpoint(folder, **options)
    checkpoint.attach(trainer)
    checkpoint.resume()
    trainer.run(data, max_iters=iterations)
    return [reason for reason in trainer.reproducibility() if "other data" in reason]


def over(dataset):
    return loader(dataset, collate_fn=list)


@pytest.mark.parametrize("case", OTHERS)
def test_other_data_of_the_size_is_named(case, tmp_path):
    resumed(tmp_path, over(OTHERS[case](0)), 1)
    assert len(resumed(tmp_path, over(OTHERS[case](1)), 2)) == 1


@pytest.mark.parametrize("case", SAME)
def test_the_same_data_is_not_named(case, tmp_path):
    resumed(tmp_path, over(SAME[case](0)), 1)
    assert resumed(tmp_path, over(SAME[case](1)), 2) == []


@pytest.mark.parametrize("kind", ["loader", "sampler of one's own", *of("windows", ["windows"])])
def test_it_is_one_line_of_the_log_once_and_strict_refuses_it(tmp_path, caplog, kind):
    def data(shift):
        dataset = TensorDataset(values(shift))
        if kind == "windows":
            return ignite_engine.Windows([1, 2], lambda name: loader(dataset, 1))
        return loader(dataset, 1) if kind == "loader" else DataLoader(dataset, 1, sampler=[*range(6)])

    resumed(tmp_path, data(0), 2)
    assert resumed(tmp_path, data(0), 3) == [] and "other data" not in caplog.text
    assert len(resumed(tmp_path, data(1), 4)) == 1
    assert len([line for line in caplog.messages if line.startswith("The data is not that")]) == 1
    if kind == "loader":
        with pytest.raises(NotExact):
            resumed(tmp_path, data(0), 5, strict=True)


def test_a_run_that_continues_in_the_process_may_have_changed_its_data(caplog):
    rows = values(0)
    data, trainer = loader(TensorDataset(rows), 2), Trainer(lambda engine, batch: None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.request_stop("a test"))
    trainer.run(data, max_iters=3)
    rows += 1
    trainer.run(data, max_iters=3)

    assert trainer.state.iteration == 3 and "other data" not in caplog.text and trainer.reproducibility() == []
