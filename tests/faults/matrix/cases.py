"""What is trained, how it runs, where it is stopped, and which combinations of these are tested."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Setup:
    """What determines the bits of a run: two runs of one setup end equal, wherever they are stopped."""

    precision: str = "fp32"
    optimizers: str = "dense"
    ema: bool = False
    loader: str = "ours"
    groups: str = "single"
    early_stopping: bool = False
    augmentation: str = "drawn"

    @property
    def key(self):
        return " ".join(str(value) for value in asdict(self).values())


@dataclass(frozen=True)
class Case:
    """One stopped and resumed run.

    Attributes:
        where: ``first``: at the first iteration; ``middle`` or ``last``: of the second epoch; ``twice``: two stops in
            the second epoch; ``evaluation``: while the set is evaluated at the second epoch's end.
        how: ``stop``: Ctrl-C to the whole group, so that it is saved there; ``kill``: SIGKILL once that
            iteration's checkpoint is on disk; ``rewind``: SIGKILL between backward and step; the newest checkpoint is
            some iterations older, or there is none.
        workers: ``0``, or two of them started by ``fork``, ``spawn`` or ``forkserver``.
        background: checkpoints are written while training continues.
        progress: an evaluation that is stopped goes on where it was.
    """

    setup: Setup
    where: str
    how: str
    workers: str = "0"
    background: bool = False
    progress: bool = False

    @property
    def key(self):
        return f"{self.where} {self.how} {self.workers} {self.background} {self.progress} | {self.setup.key}"


WHERE = ("first", "middle", "last", "twice", "evaluation")
HOW = ("stop", "kill", "rewind")
WORKERS = ("0", "fork", "spawn", "forkserver")
DIMENSIONS = {
    "where": WHERE,
    "how": HOW,
    "workers": WORKERS,
    "background": (False, True),
    "progress": (False, True),
    "precision": ("fp32", "bf16", "fp16"),
    "optimizers": ("dense", "dense and sparse"),
    "ema": (False, True),
    "loader": ("ours", "plain", "stateful"),
    "groups": ("single", "even", "short last"),
    "early_stopping": (False, True),
}
_OF_SETUP = {field.name for field in fields(Setup)}


def case_of(values):
    """A case of one value per dimension.

    A StatefulDataLoader of torchdata does not save the RNG state of its workers, as the reproducibility report says:
    with workers each of its samples is augmented from its own generator.
    """
    setup = {name: value for name, value in values.items() if name in _OF_SETUP}
    if values.get("loader") == "stateful" and values.get("workers", "0") != "0":
        setup["augmentation"] = "own"
    return Case(Setup(**setup), **{name: value for name, value in values.items() if name not in _OF_SETUP})


def pairwise(dimensions=DIMENSIONS):
    """Few cases in which each value of each dimension meets each value of each other one; the same every time."""
    names = list(dimensions)
    open_pairs = {
        (one, a, other, b)
        for one, other in itertools.combinations(names, 2)
        for a in dimensions[one]
        for b in dimensions[other]
    }
    chosen = []
    while open_pairs:
        seed = min(open_pairs, key=lambda pair: tuple(map(str, pair)))
        best = (-1, {})
        for turn in range(len(names)):  # greedy from several starts
            row = {seed[0]: seed[1], seed[2]: seed[3]}
            for name in [*names[turn:], *names[:turn]]:
                if name not in row:
                    row[name] = max(dimensions[name], key=lambda value: _gain({**row, name: value}, open_pairs, name))
            gained = len(_pairs(row, names) & open_pairs)
            if gained > best[0]:
                best = (gained, row)
        open_pairs -= _pairs(best[1], names)
        chosen.append({name: best[1][name] for name in names})
    return [case_of(row) for row in chosen]


def _pairs(row, names):
    present = [name for name in names if name in row]
    return {(one, row[one], other, row[other]) for one, other in itertools.combinations(present, 2)}


def _gain(row, open_pairs, name):
    names = list(DIMENSIONS)
    return sum(1 for pair in _pairs(row, names) & open_pairs if name in (pair[0], pair[2]))
