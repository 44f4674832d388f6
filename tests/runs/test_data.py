"""``fit`` takes the data that people have, and each kind is resumed as its one line says."""

import re
from typing import Any

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

from ignite_engine import fit
from ignite_engine.data import sampler as samplers
from tests.kit.tiny import on_two_ranks
from tests.runs.test_fit import QUIET, TRAIN, VAL, loss_fn, net, signals_come_back

SAMPLES = TensorDataset(*TRAIN)
signals = signals_come_back


def run_of(directory, train_set, val_set=VAL, **arguments):
    arguments = {"loss_fn": loss_fn, "max_epochs": 3, **QUIET, **arguments}
    return fit(net(), train_set=train_set, val_set=val_set, directory=directory, **arguments)


class Stream(IterableDataset[Any]):
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


class Batches:
    """A loader that is not torch's, of batches that it makes itself."""

    batch_size = 12

    def __len__(self):
        return 4

    def __iter__(self):
        return iter([[column[start : start + 12] for column in TRAIN] for start in range(0, 48, 12)])


WEIGHTS = torch.arange(1.0, 49.0)
KINDS = {
    "plain loader": lambda: {"train_set": DataLoader(SAMPLES, 12, shuffle=True, generator=torch.Generator())},
    "loader with a sampler": lambda: {"train_set": DataLoader(SAMPLES, 12, sampler=WeightedRandomSampler(WEIGHTS, 48))},
    "batch sampler": lambda: {
        "train_set": DataLoader(SAMPLES, batch_sampler=BatchSampler(RandomSampler(SAMPLES), 12, drop_last=False))
    },
    "other loader": lambda: {"train_set": Batches()},
    "sampler": lambda: {"train_set": TRAIN, "sampler": WeightedRandomSampler(WEIGHTS, 48), "batch_size": 12},
    "stream": lambda: {"train_set": Stream(), "batch_size": 12},
    "stream with a state": lambda: {"train_set": StreamWithState(), "batch_size": 12},
}
LINES = {
    "plain loader": r"DataLoader rebuilt to resume exactly: shuffle=True",
    "loader with a sampler": r"The order of WeightedRandomSampler is drawn for each epoch from",
    "batch sampler": r"keeps no state: .*: a resume reads what was consumed of the epoch again and drops it, in an",
    "other loader": r"Batches keeps no state: .*: a resume reads what was",
    "sampler": r"The order of WeightedRandomSampler is drawn for each epoch from \(seed, epoch\), so it is resumed",
    "stream": r"DataLoader with Stream keeps no state: .*: a resume reads what was consumed of the epoch again",
    "stream with a state": r"StatefulDataLoader is resumed by its own state\.",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_people_have_is_trained_on_stopped_and_resumed(kind, tmp_path, caplog, signals):
    if kind == "stream with a state":
        pytest.importorskip("torchdata")
    whole = run_of(tmp_path / "whole", **KINDS[kind]())
    assert whole.summary["iteration"] == 12
    assert [line for line in caplog.messages if re.search(LINES[kind], line)]

    def stop(trainer):
        trainer.request_stop("enough")

    stopped = run_of(tmp_path / "parts", **KINDS[kind](), handlers=[(stop, Events.ITERATION_COMPLETED(once=6))])
    assert stopped.summary["iteration"] == 6
    resumed = run_of(tmp_path / "parts", **KINDS[kind]())
    same = resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert same or (kind == "batch sampler" and resumed.summary["iteration"] == 12)
    exact = kind in ("plain loader", "loader with a sampler", "sampler", "stream with a state")
    assert (resumed.trainer.reproducibility() == []) == exact


class BufferShuffledExamplesIterable:
    """Its name is that of Hugging Face's."""

    ex_iterable = None


def test_shuffle_buffer_of_a_stream_is_named_as_not_exact(tmp_path, caplog):
    pytest.importorskip("torchdata")
    stream = StreamWithState()
    stream._ex_iterable = BufferShuffledExamplesIterable()
    run = run_of(tmp_path, stream, max_epochs=1)
    assert any("saves no shuffle buffer of StreamWithState" in reason for reason in run.trainer.reproducibility())
    assert "StatefulDataLoader is resumed by its own state, but StatefulDataLoader saves no shuffle" in caplog.text


def test_hugging_face_data_is_trained_on_and_resumed(tmp_path):
    """Map-style and streamed; where ``datasets`` is installed."""
    datasets = pytest.importorskip("datasets")
    columns = {"x": TRAIN[0].tolist(), "y": TRAIN[1].tolist()}
    data = datasets.Dataset.from_dict(columns).with_format("torch")

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"].float()), batch["y"])

    def stop(trainer):
        trainer.request_stop("enough")

    for name, given in {"map": data, "stream": data.to_iterable_dataset(num_shards=4)}.items():
        common = {"max_epochs": 3, "batch_size": 12, **QUIET}
        whole = fit(net(), loss, given, data, directory=tmp_path / name / "whole", **common)
        parts = tmp_path / name / "parts"
        fit(net(), loss, given, data, directory=parts, handlers=[(stop, Events.ITERATION_COMPLETED(once=6))], **common)
        resumed = fit(net(), loss, given, data, directory=parts, **common)
        assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_loaders_and_streams_are_evaluated_as_the_same_samples_are(tmp_path):
    values = [
        run_of(tmp_path / str(number), TRAIN, data, batch_size=12).metrics["val/loss"]
        for number, data in enumerate([VAL, DataLoader(TensorDataset(*VAL), 4), Stream(TensorDataset(*VAL))])
    ]
    assert values[1:] == pytest.approx(values[:1] * 2, rel=1e-6)


def test_batch_size_of_a_loader_is_that_of_the_run(tmp_path):
    run = run_of(tmp_path, DataLoader(SAMPLES, 12), max_epochs=1)
    assert run.config["data"]["batch_size"] == 12


def test_order_of_a_sampler_is_a_function_of_seed_and_epoch_over_the_ranks(monkeypatch):
    def indices(rank, ranks, pass_number, generator=None):
        drawn = WeightedRandomSampler([1.0] * 10, 10, generator=generator)
        order = samplers.DrawnSampler(drawn, seed=3, rank=rank, world_size=ranks)
        order.pass_number = pass_number
        torch.rand(rank + 1)  # nothing else decides
        return [index for _, index in order]

    whole = indices(0, 1, 1)
    assert [indices(0, 2, 1), indices(1, 2, 1)] == [whole[0::2], whole[1::2]]
    assert whole != indices(0, 1, 0)
    own = torch.Generator().manual_seed(1)
    before = own.get_state()
    assert indices(0, 1, 1, own) == indices(0, 1, 1, torch.Generator().manual_seed(2))
    assert torch.equal(own.get_state(), before)


def test_indices_of_a_sampler_may_be_tensors(tmp_path):
    chosen = DataLoader(SAMPLES, 12, sampler=SubsetRandomSampler(torch.arange(48)))
    assert run_of(tmp_path, chosen, max_epochs=1).summary["iteration"] == 4


def test_sampler_with_a_memory_of_its_own_is_named_as_not_exact(tmp_path):
    class Forgetful(list[int]):
        calls = 0

        def __iter__(self):
            self.calls += 1
            return iter([(index + self.calls) % 48 for index in range(48)])

    run = run_of(tmp_path, TRAIN, sampler=Forgetful(range(48)), max_epochs=1)
    assert "the order of Forgetful is not a function of random numbers and the epoch" in run.trainer.reproducibility()


SIX = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("schedule", "arguments", "rates"),
    [
        (lambda optimizer: SIX.StepLR(optimizer, 1, 0.5), {}, [1e-3, 5e-4, 2.5e-4]),
        (
            lambda optimizer: SIX.StepLR(optimizer, 1, 0.5),
            {"schedule_per": "step"},
            [1e-3 / 2**3, 1e-3 / 2**7, 1e-3 / 2**11],
        ),
        (lambda optimizer: SIX.CyclicLR(optimizer, 1e-3, 5e-3, 2), {}, [3e-3] * 3),
        (None, {"schedule": "none"}, [1e-3] * 3),
    ],
)
def test_torch_scheduler_steps_once_per_epoch_unless_it_is_meant_for_updates(
    schedule, arguments, rates, tmp_path, caplog
):
    used = []

    def note(trainer):
        used.append(trainer.update.optimizers["optimizer"].param_groups[0]["lr"])

    own = {} if schedule is None else {"schedule": schedule}
    handlers = [(note, Events.ITERATION_STARTED(every=4))]
    run = run_of(tmp_path, TRAIN, batch_size=12, handlers=handlers, **own, **arguments)

    assert used == pytest.approx(rates)
    said = any("steps once per epoch; schedule_per='step' changes that" in line for line in caplog.messages)
    assert said == (schedule is not None and len(set(rates)) > 1 and not arguments)
    assert ("lr" in run.metrics) == (schedule is not None)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_share_a_sampler_and_a_loader(tmp_path):
    def case(rank):
        torch.set_num_threads(1)
        seen = {}
        for kind in ("plain loader", "sampler"):
            read = []

            class Watching(TensorDataset):
                def __getitem__(self, index, read=read):
                    read.append(index)
                    return super().__getitem__(index)

            data = Watching(*TRAIN)
            given = (
                {"train_set": DataLoader(data, 6, shuffle=True, generator=torch.Generator())}
                if kind == "plain loader"
                else {"train_set": data, "sampler": range(48), "batch_size": 6}
            )
            run_of(tmp_path / kind, max_epochs=1, **given)
            seen[kind] = sorted(read)
        run_of(tmp_path / "whole", max_epochs=1, **KINDS["batch sampler"]())
        run_of(tmp_path / "stream", max_epochs=1, **KINDS["stream"]())
        return seen

    answers = on_two_ranks(case, tmp_path / "meeting")
    for kind in ("plain loader", "sampler"):
        assert sorted(answers[kind][0] + answers[kind][1]) == list(range(48))
    for folder, name in {"whole": "DataLoader", "stream": "Stream"}.items():
        log = (tmp_path / folder / "logs" / "rank_0.log").read_text()
        assert f"{name} is read whole by each of the 2 ranks, unless it yields the share of data_rank()" in log
