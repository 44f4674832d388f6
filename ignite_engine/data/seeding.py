"""Random numbers of a sample as a function of (seed, pass, index)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from ignite_engine import rng
from ignite_engine.data.sampler import Key
from ignite_engine.errors import shapes_of

Seed = Callable[[int], Any]
_FIRST, _LOOKED_AT = 64, 4096
"""Elements of a list, and objects in all, among which generators are looked for."""
_NOT_LOOKED_INTO = (type, ModuleType, FunctionType, torch.Tensor, torch.nn.Module)


class SeededDataset(Dataset[Any]):
    """A dataset whose random choices depend on (seed, pass, index) alone: the same with any number of workers.

    It collates too, with random numbers keyed by the batch's first sample. So are those of a dataset that reads whole
    batches (``__getitems__``), which is asked for one batch at a time: they depend on what the batch holds, so on the
    batch size and the number of ranks, but not on the number of workers nor on where a run was resumed.

    So are the generators that the dataset has of its own, in its attributes and those of its transforms; what they draw
    elsewhere in this process is not as it was.

    All global generators are restored, for what else draws from them in this process: training, a dataset that reads
    this one, a thread of a worker.

    Seeding those of Python and NumPy costs more than many samples, and most datasets draw from torch's or none. So they
    are seeded for each sample of the first batch in each process, and from then on only if they were drawn from. If a
    later batch moves one, it is read again with both seeded, and so are all that follow. Every call that draws has the
    numbers that it would have if both were always seeded, but one that only reads their state or puts back what it
    drew, or that keeps what it drew in the batch that is read again.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate_fn, self.seed = dataset, collate_fn, seed
        self.reads_batches = reads_whole_batches(dataset)
        self._draws: bool | None = None
        """Whether Python's or NumPy's generators are drawn from; None until the first batch."""
        self._own: list[Any] | None = None
        """The dataset's own generators."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """The batch of these samples, all from one pass."""
        outside = rng.snapshot()
        if self._own is None:
            self._own = own_generators(self.dataset)
        try:
            if self._draws is None:
                watch = _Watch()
                batch = self._read(keys, watch)
                watch.look()
                self._draws = watch.moved
                return batch
            if not self._draws:
                try:
                    batch = self._read(keys, torch.default_generator.manual_seed)
                except Exception:  # perhaps of the wrong numbers
                    if rng.host_is_at(outside):
                        raise
                else:
                    if rng.host_is_at(outside):
                        return batch
                self._draws = True
            return self._read(keys, rng.seed_host)
        finally:
            try:
                rng.restore_snapshot(outside)
            except BaseException:  # a signal's, as it may come anywhere; where it stops the run they are saved
                rng.restore_snapshot(outside)
                raise

    def _read(self, keys: Sequence[Key], seed: Seed) -> Any:
        (pass_number, *_), indices = zip(*keys)
        seeds = rng.mix_each(rng.mix(self.seed, pass_number), indices)
        dataset, samples = self.dataset, list[Any]()
        at: Any = indices
        try:
            if self.reads_batches:
                seed(seeds[0])
                self._seed_own(seeds[0])
                samples = dataset.__getitems__([*indices])  # its own list, which it may use up
            else:
                for at, number in zip(indices, seeds, strict=True):
                    seed(number)
                    if self._own:
                        self._seed_own(number)
                    samples.append(dataset[at])
        except StopIteration as error:
            raise _unfinished(f"{type(dataset).__name__}[{at}]") from error
        except Exception as error:
            error.add_note(f"Raised for {type(dataset).__name__}[{at}].")
            raise
        seed(rng.mix_next(seeds[0], 1))
        try:
            return self.collate_fn(samples)
        except StopIteration as error:
            raise _unfinished(f"collate_fn for the batch from {type(dataset).__name__}[{indices[0]}] on") from error
        except Exception as error:
            error.add_note(f"Raised while {shapes_of(samples)} of {type(dataset).__name__} was collated.")
            raise

    def _seed_own(self, number: int) -> None:
        for place, generator in enumerate(self._own or (), start=2):  # 1 is of what collates
            rng.seed_generator(generator, rng.mix_next(number, place))


def _unfinished(what: str) -> RuntimeError:
    """What is raised in the place of a StopIteration, by which the reader of the batches would end the pass."""
    return RuntimeError(f"{what} raised StopIteration, which would end the pass: give next() a default, or catch it.")


class _Watch:
    """Seeds all generators of the host, and sees whether those of Python and NumPy are drawn from in between."""

    def __init__(self) -> None:
        self.moved, self._seeded = False, tuple[Any, ...]()

    def __call__(self, seed: int) -> None:
        self.look()
        rng.seed_host(seed)
        self._seeded = rng.snapshot()

    def look(self) -> None:
        self.moved = self.moved or bool(self._seeded and not rng.host_is_at(self._seeded))


def own_generators(dataset: Any) -> list[Any]:
    """The random generators in the attributes of ``dataset``, of its class, and of what these hold, in a fixed order.

    Of a list only the first elements are looked at: transforms, and not samples.
    """
    found: dict[int, Any] = {}
    seen = {id(dataset)}
    values = [dataset]
    for value in values:
        if rng.is_generator(value):
            found[id(value)] = value
            continue
        inside: list[Any] = []
        if isinstance(value, Mapping):
            inside = [*islice(value.values(), _FIRST)]
        elif isinstance(value, list | tuple):
            inside = [*value[:_FIRST]]
        elif hasattr(value, "__dict__") and not isinstance(value, _NOT_LOOKED_INTO):
            of_classes = [each for kind in type(value).__mro__ for each in vars(kind).values()]
            inside = [*vars(value).values(), *filter(rng.is_generator, of_classes)]
        new = [each for each in inside if id(each) not in seen]
        seen.update(map(id, new))
        values += new[: max(_LOOKED_AT - len(values), 0)]
    return [*found.values()]


def reads_whole_batches(dataset: Any) -> bool:
    """Whether ``dataset`` itself reads several samples at once; torch's Subset only passes that on."""
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
