"""``fit`` takes the data that people have; one line says how each kind is resumed."""

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.kit.fitting import TRAIN, VAL, at, digest, fitted, stop
from tests.kit.processes import ranks
from tests.kit.tiers import tiered

SAMPLES, WEIGHTS = TensorDataset(*TRAIN), torch.arange(1.0, 49.0)


class Stream(IterableDataset):
    """Samples in an order that depends on the epoch, if it is told."""

    def __init__(self, samples=SAMPLES):
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.epoch))
        return (self.samples[index] for index in order.tolist())


class StreamWithState(Stream):
    """As those of Hugging Face: it saves and loads how many samples of the pass were read."""

    def __init__(self):
        super().__init__()
        self.read = self.start = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.start = state["read"]

    def __iter__(self):
        self.read, self.start = self.start, 0
        for position, sample in enumerate(super().__iter__()):
            if position >= self.read:
                self.read += 1
                yield sample
        self.read = 0


class Shuffled(StreamWithState):
    """As Hugging Face's with a shuffle buffer, which saves no state of it."""

    class BufferShuffledExamplesIterable:
        ex_iterable = None

    def __init__(self):
        super().__init__()
        self._ex_iterable = self.BufferShuffledExamplesIterable()


class Batches:
    """A loader that is not torch's, of batches that it makes itself."""

    batch_size = 12

    def __len__(self):
        return 4

    def __iter__(self):
        return iter([[column[start : start + 12] for column in TRAIN] for start in range(0, 48, 12)])


class Forgetful(list):
    """A sampler whose order is no function of the epoch."""

    calls = 0

    def __iter__(self):
        self.calls += 1
        return iter([(index + self.calls) % 48 for index in range(48)])


def loader(**options):
    return lambda: {"train": DataLoader(SAMPLES, 12, **options)}


KINDS = {  # the data, what is said where its resume may not be exact, and whether it is (None: it is not tried)
    "plain loader": (loader(shuffle=True, generator=torch.Generator()), "", True),
    "its sampler": (loader(sampler=WeightedRandomSampler(WEIGHTS, 48)), "", True),
    "its batches": (
        lambda: {"train": DataLoader(SAMPLES, batch_sampler=BatchSampler(RandomSampler(SAMPLES), 12, False))},
        "",
        True,
    ),
    "other loader": (lambda: {"train": Batches()}, "Batches keeps no state", True),
    "sampler": (lambda: {"sampler": WeightedRandomSampler(WEIGHTS, 48)}, "", True),
    "tensor indices": (loader(sampler=SubsetRandomSampler(torch.arange(48))), "", True),
    "forgetful sampler": (lambda: {"sampler": Forgetful(range(48))}, "Forgetful is not a function", None),
    "stream": (lambda: {"train": Stream()}, "Stream keeps no state", True),
    "stream with a state": (lambda: {"train": StreamWithState()}, "", True),
    "shuffle buffer": (lambda: {"train": Shuffled()}, "saves no shuffle buffer", None),
}


@pytest.mark.parametrize(
    "kind",
    tiered(
        KINDS, "plain loader", "its batches", "sampler", "forgetful sampler", "stream with a state", "shuffle buffer"
    ),
)
def test_what_people_have_is_trained_on_stopped_and_resumed(kind, tmp_path):
    make, line, exact = KINDS[kind]
    size = {"batch_size": ... if isinstance(make().get("train"), DataLoader | Batches) else 12}
    whole = fitted(tmp_path / "whole", **make(), **size)
    assert whole.summary["iteration"] == 12 and line in str(whole.trainer.reproducibility())
    assert whole.config["data"]["batch_size"] == 12 or kind == "its batches"
    if exact is None:
        return
    fitted(tmp_path / "run", **make(), **size, handlers=[at(6, stop)])
    resumed = fitted(tmp_path / "run", **make(), **size)
    assert resumed.summary["iteration"] == 12 and resumed.summary["resumed_from"] == "iteration_00000006"
    assert (digest(resumed) == digest(whole)) == exact


@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_loaders_and_streams_are_evaluated_as_their_samples_are(kind, tmp_path):
    samples = TensorDataset(*VAL)
    data = DataLoader(samples, 5) if kind == "loader" else Stream(samples)
    losses = [fitted(tmp_path / name, val=val).metrics["val/loss"] for name, val in (("a", VAL), ("b", data))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("kind", ["plain loader", "sampler"])
def test_ranks_share_a_sampler_and_a_loader(kind, tmp_path):
    def work(rank):
        read = []

        class Watching(TensorDataset):
            def __getitem__(self, index):
                read.append(index)
                return super().__getitem__(index)

        data = Watching(*TRAIN)
        order = torch.Generator()
        given = {"sampler": range(48), "train": data, "batch_size": 6}
        if kind == "plain loader":
            given = {"train": DataLoader(data, 6, shuffle=True, generator=order), "batch_size": ...}
        fitted(tmp_path, **given, max_epochs=1, val=None)
        return sorted(read)

    first, second = ranks(2, work)
    assert sorted(first + second) == list(range(48)) and len(first) == 24


def test_data_that_each_rank_reads_whole_is_said(tmp_path):
    ranks(2, lambda rank: fitted(tmp_path, train=Stream(), batch_size=12, max_epochs=1) and None)
    assert "Stream is read whole by each of the 2 ranks" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_the_order_of_a_sampler_is_a_function_of_seed_and_epoch(tmp_path):
    def order(folder, seed):
        seen = []

        class Watching(TensorDataset):
            def __getitem__(self, index):
                seen.append(index)
                return super().__getitem__(index)

        sampler = WeightedRandomSampler(WEIGHTS, 48)
        draw = (lambda trainer: torch.rand(seed + 1), Events.EPOCH_STARTED)  # nothing else decides
        fitted(tmp_path / folder, train=Watching(*TRAIN), sampler=sampler, val=None, seed=seed, handlers=[draw])
        return seen[-144:]

    first, again, other = order("a", 0), order("b", 0), order("c", 1)
    assert first == again != other and first[:48] != first[48:96]


def test_a_model_may_be_a_function_of_named_columns(tmp_path):
    columns = [{"x": x, "y": y} for x, y in zip(*TRAIN, strict=True)]

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    run = fitted(tmp_path, loss, train=columns, val=columns[:9])
    assert run.metrics["val/loss"] > 0
