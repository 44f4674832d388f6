"""Weights, optimizer state and every line of the log have the same bits on 1, 2, 3 and 4 ranks."""

import json
import math
import os
import signal
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from ignite.metrics import Accuracy, Average, Loss, MeanSquaredError, Precision, Recall
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ignite_engine import Trainer, Update, create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation, LRSchedule, MetricLogger, warmup_cosine
from tests.kit.processes import ranks, start_ranks
from tests.kit.resume import leaves, same_bits
from tests.kit.tiny import Numbers, linear, one
from tests.update.test_non_finite import Planted, journal, planted_loss


@dataclass(frozen=True)
class Case:
    """What determines the bits of a run; each draws random numbers in the model (dropout) and in the data."""

    precision: str = "fp32"
    tokens: bool = False  # micro-batches weigh their number of tokens, some nothing
    batch_size: int = 3
    micro_batches: int = 8
    clip_norm: float | None = None
    workers: int = 0
    log_every: int = 1
    evaluate: bool = True
    limit: int | None = None  # of the evaluation, over all ranks
    invariant: bool = True


class Ragged(Dataset):
    """Sequences of 0 to 9 tokens, padded with -1; each is perturbed at random."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        lengths = torch.randint(0, 10, (count,), generator=generator)
        self.tokens = torch.randint(0, 17, (count, 10), generator=generator)
        self.tokens[torch.arange(10) >= lengths[:, None]] = -1
        self.tokens[: count // 4] = -1  # whole micro-batches without a token, where they are not shuffled

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return torch.where(tokens >= 0, (tokens + torch.randint(0, 3, (1,))) % 17, tokens)


class Net(nn.Module):
    """Some parameters get a gradient in a few micro-batches only, in one case of -0.0, and one in none."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 24)
        self.body = nn.Sequential(nn.Linear(24, 33), nn.LayerNorm(33), nn.GELU(), nn.Dropout(0.3), nn.Linear(33, 24))
        self.head, self.rare = nn.Linear(24, 17), nn.Linear(24, 17)
        self.unused, self.negative_zero = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        hidden = self.body(self.embedding(tokens.clamp_min(0)))
        logits = self.head(hidden)
        if int(tokens.sum()) % 3 == 0:
            logits = logits - 0.0 * self.negative_zero.sum()
        return logits + self.rare(hidden) if int(tokens.sum()) % 5 == 0 else logits


def count_tokens(batch):
    return int((batch[:, 1:] >= 0).sum())


def loss_fn(model, batch):
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-1, reduction="sum")
    return loss / max(1, count_tokens(batch)), {"largest": logits.detach().abs().max()}


def predict(model, batch):
    """Logits that are perturbed at random, and targets."""
    logits = model(batch[:, :-1])
    return logits.flatten(0, 1).double() + torch.rand(()), batch[:, 1:].flatten().clamp_min(0)


def metrics():
    """Counts, sums of floats, a sum that is infinite, and what is computed from such."""
    precision, recall = Precision(average=False), Recall(average=False)
    return {
        "accuracy": Accuracy(),
        "loss": Loss(nn.functional.cross_entropy),
        "spread": Average(lambda output: output[0].std()),
        "squared": MeanSquaredError(lambda output: (output[0].amax(dim=1), output[1].double())),
        "infinite": Average(lambda output: math.inf),
        "f1": (precision * recall * 2 / (precision + recall + 1e-20)).mean(),
    }


def train(rank, folder, case, kill_at=None):
    """From the newest checkpoint in ``folder`` to the end; all it ends with, on rank 0, and whether it was alone.

    Args:
        kill_at: all ranks are killed once this iteration has ended.
    """
    torch.manual_seed(11 + rank)  # other weights and random numbers on each rank
    model = wrapped = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if dist.get_world_size() > 1 and (not case.invariant or case.tokens):  # DDP's own module may be given
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    options = {"precision": case.precision, "clip_norm": case.clip_norm}
    accumulate = "rank_invariant" if case.invariant else None
    weight_fn = count_tokens if case.tokens else None
    update = Update(wrapped, optimizer, loss_fn, weight_fn=weight_fn, accumulate=accumulate, **options)
    trainer = Trainer(update, global_micro_batches=case.micro_batches)
    LRSchedule(warmup_cosine(optimizer, warmup=2, total=12)).attach(trainer)
    MetricLogger(folder, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=case.log_every))
    if case.evaluate:
        evaluator = create_evaluator(model, predict, metrics(), precision=case.precision)
        evaluation = Evaluation(evaluator, loader(Ragged(31), 2), limit=case.limit)
        evaluation.attach(trainer, Events.ITERATION_COMPLETED(every=3) | Events.STARTED)
    checkpoint = Checkpoint(folder / "checkpoints", strict=case.invariant)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    checkpoint.resume()
    gradients = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        gradients.append([None if each.grad is None else each.grad.clone() for each in model.parameters()])
        if trainer.state.iteration == kill_at:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    data = loader(Ragged(53), case.batch_size, shuffle=True, seed=3, num_workers=case.workers)
    trainer.run(data, max_epochs=2)
    lines = (folder / "metrics.jsonl").read_text().splitlines() if rank == 0 else []
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lines": lines, "gradients": gradients}
    return dict(leaves(held)) if rank == 0 else None


def assert_same_bits(found, expected, leave_out=None):
    differ = [key for key in expected if key[0] != leave_out and not same_bits(expected[key], found.get(key))]
    assert not differ and (leave_out or found.keys() == expected.keys()), differ[:5]


PAIRS = {
    "tokens, clipped": (Case("fp32", tokens=True, clip_norm=0.5), (2, 3, 4)),
    "bf16": (Case("bf16", micro_batches=7, log_every=3, limit=7), (3,)),
    "workers": (Case("fp32", micro_batches=6, batch_size=2, workers=2), (4,)),
    "fp16, tokens, clipped": (Case("fp16", tokens=True, micro_batches=4, clip_norm=0.5), (2,)),
}
LONG = {("tokens, clipped", 2), ("tokens, clipped", 4)}
"""Beside three ranks, which share eight micro-batches unevenly."""


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=[pytest.mark.nightly] * (name == "workers" or (name, count) in LONG))
        for name, (_, counts) in PAIRS.items()
        for count in counts
    ],
)
def test_bits_do_not_depend_on_the_number_of_ranks(name, count, tmp_path):
    case = PAIRS[name][0]
    (alone,), (several, *_) = (ranks(n, train, tmp_path / str(n), case) for n in (1, count))
    assert_same_bits(several, alone)


@pytest.mark.row("K4")
@pytest.mark.parametrize(
    ("case", "starts"),
    [
        pytest.param(PAIRS["tokens, clipped"][0], ((2, 3), (4, 5), (3, None)), marks=pytest.mark.nightly),
        # rank 1 begins with a tail in which it has nothing to do
        (Case("fp16", micro_batches=8, evaluate=False), ((1, 3), (2, None))),
    ],
    ids=["2 to 4 to 3", "1 to 2 before a tail"],
)
def test_run_killed_and_restarted_on_other_ranks_ends_with_the_same_bits(case, starts, tmp_path):
    (whole,) = ranks(1, train, tmp_path / "whole", case)
    for count, kill_at in starts:
        if kill_at is None:
            ended, *_ = ranks(count, train, tmp_path / "restarted", case)
        else:
            killed = start_ranks(count, train, tmp_path / "restarted", case, kill_at)
            assert [each.wait() for each in killed] == [-signal.SIGKILL] * count, killed[0].said()
    assert_same_bits(ended, whole, leave_out="gradients")


def test_usual_reduction_has_other_bits(tmp_path):
    """Else the comparisons above would prove nothing."""
    ends = [ranks(count, train, tmp_path / str(count), Case(invariant=False))[0] for count in (1, 2)]
    weights = [key for key in ends[0] if key[0] == "model"]
    assert not all(same_bits(ends[0][key], ends[1][key]) for key in weights)
    logged = [[json.loads(value)["iteration"] for key, value in end.items() if key[0] == "lines"] for end in ends]
    assert logged[0] == logged[1]


def summed(rank, sizes):
    """Gradients of 8 micro-batches that are different where they are not added in pairs."""
    values = [2.0**24, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    model = nn.ParameterList([torch.ones(size) for size in sizes])

    def loss(model, batch):
        return sum((weight * batch * 2.0**n).sum() for n, weight in enumerate(model)) * 8

    update = Update(model, torch.optim.SGD(model.parameters(), 0.0), loss, accumulate="rank_invariant")
    trainer = Trainer(update, global_micro_batches=8)
    trainer.run(loader(torch.tensor(values), 1), max_epochs=1)
    return [parameter.grad.tolist() for parameter in model]


def test_every_element_is_summed_in_the_order_of_the_tree_on_any_ranks():
    sizes = (1, 17, 3, 40)
    found = [answer for count in (1, 2, 3) for answer in ranks(count, summed, sizes)]
    assert found[0] == [[2.0**n * (2.0**24 + 4)] * size for n, size in enumerate(sizes)]
    assert all(each == found[0] for each in found)


def left_out(rank):
    model = linear()
    options = {"non_finite": "skip", "accumulate": "rank_invariant"}
    update = Update(model, torch.optim.SGD(model.parameters(), 0.01), planted_loss, **options)
    trainer = Trainer(update, global_micro_batches=3)
    trainer.run(loader(Planted(23, (7, 22)), 2), max_epochs=1)
    return journal(trainer), trainer.state.skipped_steps


def test_journal_of_what_is_not_finite_has_the_samples_of_each_rank_and_the_loss_of_all():
    (entries, skipped), other = ranks(2, left_out)
    assert (list(entries), skipped) == ([2, 4], 2) and repr(other) == repr((entries, skipped))
    samples, losses = (list(zip(*(entry[key] for entry in entries.values()))) for key in ("samples", "loss"))
    assert samples == [([6, 7, 8, 9], [18, 19, 20, 21]), ([10, 11], [22])], "the last batch is a short one"
    assert [[math.isnan(loss) for loss in of_rank] for of_rank in losses] == [[True, True], [True, True]]


def skipping(rank, bad):
    """Weights of a run that skips iteration 3 or not; each iteration has random numbers of its own."""
    model = linear(dropout=True)
    update = Update(model, torch.optim.Adam(model.parameters(), 0.05), planted_loss, non_finite="skip",
                    accumulate="rank_invariant", weight_fn=partial(weight_of, bad))  # fmt: skip
    Trainer(update, global_micro_batches=2).run(loader(Planted(bad=bad), 2))
    return one(model).tolist()


def weight_of(bad, batch):
    """Where nothing is planted the third iteration weighs nothing, and is skipped, too."""
    third = Numbers(24).inputs[8:12]
    return float(bool(bad) or not any(torch.equal(row, other) for row in batch[0] for other in third))


@pytest.mark.parametrize("count", [1, 2])
def test_steps_that_are_not_finite_are_skipped_as_those_without_weight(count):
    assert ranks(count, skipping, (9,)) == ranks(count, skipping, ())
