"""What the ``uneven`` judge draws: data that differs between ranks, and a run on them that may be stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ignite_engine import loader

CHOICES: dict[str, tuple[Any, ...]] = {
    "data": ("loader", "plain", "list", "stream", "own state", "stateful", "stateful, 2 workers"),
    "accumulation": (None, 1, 2, 3),
    "weighted": (False, True),
    "shuffle": (False, True),
    "epochs": (1, 2, 3),
    "model": ("linear", "dropout and batch norm"),
    "after the stop": ("the same", "other ranks", "other ranks and batch size"),
}
FEATURES = tuple(f"{name}: {value}" for name, values in CHOICES.items() for value in values) + tuple(
    f"happened: {what}"
    for what in ("uneven", "a rank without a batch", "stopped", "stopped while a rank was exhausted", "elastic")
)
SHARED = ("loader", "plain")
"""Data of which the ranks share one; of the others each has its own."""


@dataclass(frozen=True)
class Case:
    """One run: on each rank ``batches`` of its own, or ``samples`` that the ranks share."""

    number: int
    ranks: int
    data: str
    batches: tuple[int, ...]
    samples: int
    batch_size: int
    accumulation: int | None
    weighted: bool
    shuffle: bool
    epochs: int
    model: str
    stop_at: float
    """The share of the run after which it is stopped, 1 or more: not at all."""
    ranks_after: int
    batch_size_after: int

    @property
    def after(self) -> str:
        if self.ranks_after == self.ranks:
            return "the same"
        return "other ranks" if self.batch_size_after == self.batch_size else "other ranks and batch size"


def draw(number: int) -> Case:
    """The case of a number."""
    pick = random.Random(number)
    drawn = {name: pick.choice(values) for name, values in CHOICES.items()}
    if drawn["data"] == "stateful, 2 workers" and pick.random() < 0.7:  # they take a second to start
        drawn["data"] = "stateful"
    ranks, batch_size = pick.choice((2, 2, 3, 4)), pick.choice((1, 2, 3, 4))
    lengths = tuple(pick.choice((0, 1, 2, 3, 4, 7)) for _ in range(ranks))
    ranks_after, batch_size_after = ranks, batch_size
    if drawn["after the stop"] != "the same" and drawn["data"] in SHARED:
        ranks_after = pick.choice([each for each in (1, 2, 3, 4) if each != ranks])
        if drawn["after the stop"] == "other ranks and batch size" and not ranks * batch_size % ranks_after:
            batch_size_after = ranks * batch_size // ranks_after
    return Case(
        number=number,
        ranks=ranks,
        data=drawn["data"],
        batches=lengths if any(lengths) else (*lengths[:-1], 2),
        samples=pick.choice((1, 3, 5, 12, 17, 29)),
        batch_size=batch_size,
        accumulation=drawn["accumulation"],
        weighted=drawn["weighted"],
        shuffle=drawn["shuffle"],
        epochs=drawn["epochs"],
        model=drawn["model"],
        stop_at=pick.random() * 1.2,
        ranks_after=ranks_after,
        batch_size_after=batch_size_after,
    )


class Ids(Dataset[Any]):
    """Sample i is ``(i, features of i)``."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index, features(index)


def features(index: int) -> torch.Tensor:
    return torch.tensor([(index * k % 7) / 7 - 0.5 for k in (1, 2, 3)])


class Stream(IterableDataset[Any]):
    """``count`` samples without a length, which draw from the global generator; each worker has its share."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count, self.next = first, count, 0

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        mine = range(0 if worker is None else worker.id, self.count, 1 if worker is None else worker.num_workers)
        start, self.next = self.next, 0
        for place in range(start, len(mine)):
            self.next = place + 1
            index = self.first + mine[place]
            yield index, features(index)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class StreamOfIterators(IterableDataset[Any]):
    """The same, whose iterator keeps the state, so that it still says so when it has ended."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        step = 1 if worker is None else worker.num_workers
        return _Rest([self.first + place for place in range(0 if worker is None else worker.id, self.count, step)])


class _Rest(Iterator[Any]):
    def __init__(self, ids: list[int]) -> None:
        self.ids, self.next = ids, 0

    def __next__(self) -> Any:
        if self.next >= len(self.ids):
            raise StopIteration
        self.next += 1
        return self.ids[self.next - 1], features(self.ids[self.next - 1])

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class OwnState:
    """A loader with a state of its own, which draws from the global generator for each batch."""

    def __init__(self, first: int, batches: int, size: int) -> None:
        self.first, self.batches, self.size, self.next = first, batches, size, 0

    def __iter__(self) -> Iterator[Any]:
        torch.rand(())
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        while self.next < self.batches:
            noise = torch.rand(self.size, 3) * 1e-9  # far below what a comparison sees, but drawn
            ids = torch.arange(self.size) + self.first + self.next * self.size
            self.next += 1
            yield ids, torch.stack([features(int(index)) for index in ids]) + noise
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def data_of(case: Case, rank: int, batch_size: int) -> Any:
    """What rank ``rank`` gives to ``run()``."""
    if case.data == "loader":
        return loader(Ids(case.samples), batch_size, shuffle=case.shuffle)
    if case.data == "plain":
        return DataLoader(Ids(case.samples), batch_size, shuffle=case.shuffle)
    first, count = 1000 * rank, case.batches[rank] * batch_size - (batch_size > 1)
    if case.data == "own state":
        return OwnState(first, case.batches[rank], batch_size)
    if case.data == "list":
        return list(DataLoader(Ids(0) if count <= 0 else _Shifted(first, count), batch_size))
    if case.data == "stream":
        return DataLoader(_Plain(first, count), batch_size)
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

    workers = 2 * case.data.endswith("workers")
    stream = StreamOfIterators if workers and case.number % 4 else Stream  # the latter may be announced as inexact
    return StatefulDataLoader(stream(first, count), batch_size, num_workers=workers)


class _Shifted(Ids):
    def __init__(self, first: int, count: int) -> None:
        super().__init__(count)
        self.first = first

    def __getitem__(self, index: int) -> Any:
        return self.first + index, features(self.first + index)


class _Plain(IterableDataset[Any]):
    """Without a state."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.first, self.first + self.count):
            yield index, features(index)
