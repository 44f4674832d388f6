"""The judge of random numbers in samples: loaders that seed only what is drawn from give those of seeding in full.

A case is a dataset and a collate function that draw from some generators, for some of their samples, now and then
raise because of a number that they drew, and change their arguments. Its batches, errors and the generators of the
process afterwards are compared with those of :class:`SeededInFull`; so is how often samples were read again: at most
once for each generator, and each batch once for each generator that the collate function draws from.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from ignite_engine import rng
from ignite_engine.data import SeededDataset
from tests.search.common import PASSED, Failure, Result, case_seeds

FAILED = "failed"
DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "python 64 bits": lambda: random.getrandbits(64),
    "python shuffle": lambda: random.sample(range(9), 4),
    "numpy": lambda: np.random.rand(),
    "numpy normal": lambda: np.random.randn(),
    "numpy 624 words": lambda: np.random.rand(312).sum(),
    "numpy integers": lambda: int(np.random.randint(9)),
    "numpy seeded": lambda: np.random.RandomState(np.random.randint(99)).rand(),
    "torch": lambda: torch.rand(()).item(),
    "torch normal": lambda: torch.randn(3).tolist(),
    "torch's seed": torch.initial_seed,
    "seeds itself": lambda: (random.seed(5), np.random.seed(5), random.random(), np.random.rand())[2:],
    "its own": lambda: random.Random(3).random(),
}
WHEN = ("always", "never", "some", "late", "by chance")
KINDS = ("alone", "batches", "subset", "subset of subset", "list")
COLLATES = ("list", "draws", "draws late", "changes samples", "fails")
OUTSIDE = ("nothing", "python", "numpy normal", "torch", "numpy")
FEATURES = tuple(
    f"{name}: {value}"
    for name, values in (("draw", DRAWS), ("when", WHEN), ("kind", KINDS), ("collate", COLLATES), ("outside", OUTSIDE))
    for value in values
)


class SeededInFull(SeededDataset):
    """All generators seeded for each call, as the numbers are defined."""

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        with rng.isolated():
            (pass_number, first), samples = keys[0], []
            if self.reads_batches:
                rng.seed_host(rng.mix(self.seed, pass_number, first))
                samples = self.dataset.__getitems__([index for _, index in keys])
            else:
                for pass_number, index in keys:
                    rng.seed_host(rng.mix(self.seed, pass_number, index))
                    samples.append(self.dataset[index])
            rng.seed_host(rng.mix(self.seed, pass_number, first, 1))
            return self.collate_fn(samples)


class Case:
    """What a number draws."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.length, self.batch_size = draw.randint(1, 150), draw.choice((2, 7, 16, 33, 64))
        self.kind, self.collate = draw.choice(KINDS), draw.choice(COLLATES)
        self.when, self.outside = draw.choice(WHEN), draw.choice(OUTSIDE)
        self.draws = draw.sample(sorted(DRAWS), draw.randint(1, 3))
        self.raises = draw.random() < 0.3
        self.part = draw.randint(2, 40)
        self.seed = draw.randrange(2**40)
        self.passes = [draw.sample(range(self.length), self.length) for _ in range(2)]

    @property
    def features(self) -> list[str]:
        of_draws = [f"draw: {name}" for name in self.draws] if self.when != "never" else []
        return [
            *of_draws,
            f"when: {self.when}",
            f"kind: {self.kind}",
            f"collate: {self.collate}",
            f"outside: {self.outside}",
        ]

    def draws_for(self, index: int) -> bool:
        some, late = index % self.part == 1, index >= 0.8 * self.length
        return {"always": True, "never": False, "some": some, "late": late, "by chance": True}[self.when]

    def sample(self, index: int) -> list[Any]:
        values: list[Any] = [index]
        if not self.draws_for(index):
            return values
        for name in self.draws:
            values.append(DRAWS[name]())
            if self.when == "by chance" and str(values[-1])[-1] in "13579":
                break
        if self.raises and str(values[-1])[-1] == "7":
            raise ValueError(f"{values}")
        return values

    def collated(self, samples: list[Any]) -> Any:
        if self.collate == "changes samples" and self.kind != "list":
            for sample in samples:
                sample.insert(0, sample.pop() if len(sample) > 1 else "none")
        first = samples[0] if self.kind == "list" else samples[0][-1]
        first = first % 10 if isinstance(first, int) else 3
        if self.collate == "draws" or (self.collate in ("draws late", "changes samples") and first == 3):
            return [samples, *(DRAWS[name]() for name in self.draws)]
        if self.collate == "fails" and first % 2:
            drawn = DRAWS[self.draws[0]]()
            if str(drawn)[-1] in "13579":
                raise KeyError(f"{drawn}")
        return samples


class Samples(Dataset[Any]):
    """Counts what is read."""

    def __init__(self, case: Case) -> None:
        self.case, self.read = case, 0

    def __len__(self) -> int:
        return self.case.length

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.case.sample(index)


class Batches(Samples):
    def __getitems__(self, indices: Sequence[int]) -> Any:
        return [self[index] for index in indices]


def dataset_of(case: Case) -> tuple[Any, Samples]:
    base = Batches(case) if case.kind == "batches" else Samples(case)
    order = random.Random(case.seed).sample(range(case.length), case.length)
    if case.kind == "subset":
        return Subset(base, order), base
    if case.kind == "subset of subset":
        return Subset(Subset(base, order), order), base
    if case.kind == "list":
        return list(range(case.length)), base
    return base, base


def judge(number: int) -> tuple[str | None, str, Case]:
    """What differs first, the outcome, and the case."""
    case = Case(number)
    (lazy, reads), (full, once) = dataset_of(case), dataset_of(case)
    ours, reference = (
        kind(data, case.collated, case.seed) for kind, data in ((SeededDataset, lazy), (SeededInFull, full))
    )
    for pass_number, order in enumerate(case.passes):
        for start in range(0, case.length, case.batch_size):
            keys = [(pass_number, index) for index in order[start : start + case.batch_size]]
            if case.outside != "nothing":
                DRAWS[case.outside]()
            with rng.isolated():
                expected = outcome(reference, keys), everything()
            found = outcome(ours, keys), everything()
            if found != expected:
                what = "batch" if found[0] != expected[0] else "generators after the batch"
                return f"{what} at {keys[0]}: {found[0]!r:.80} for {expected[0]!r:.80}", FAILED, case
    unit = case.batch_size if case.kind == "batches" else 1
    if reads.read > once.read + 2 * unit + 2 * case.batch_size:
        return f"{reads.read} reads where {once.read} are needed", FAILED, case
    return None, PASSED, case


def outcome(data: SeededDataset, keys: Sequence[tuple[int, int]]) -> Any:
    try:
        return data.__getitems__(keys)
    except (ValueError, KeyError) as error:
        return repr(error)


def everything() -> Any:
    name, words, *rest = np.random.get_state()  # type: ignore[misc]  # the legacy form
    return random.getstate(), (name, words.tobytes(), rest), torch.get_rng_state().numpy().tobytes()


def run(seed: int, cases: int | None, minutes: float | None) -> Result:
    result, began = Result("seeding", seed, FEATURES), time.monotonic()
    with rng.isolated():
        for number in case_seeds(seed, cases, minutes):
            rng.seed_host(number)
            reason, end, case = judge(number)
            if reason is not None:
                result.failures.append(Failure("seeding", number, reason))
                print(result.failures[-1], flush=True)
                continue
            result.outcomes[end] += 1
            result.exercised.update(case.features)
    result.seconds = time.monotonic() - began
    return result
