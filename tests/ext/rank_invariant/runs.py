"""Runs whose bits should not depend on the number of ranks: started in a child of a fork server, killed, compared."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Average, Loss, MeanSquaredError, Precision, Recall
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ignite_engine import Trainer, Update, create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation, LRSchedule, MetricLogger, warmup_cosine
from ignite_engine.ranks import agreement
from tests.ranks.forked import on_ranks

START = "tests.ext.rank_invariant.runs:start"
MODULES = ("tests.ext.rank_invariant.runs",)
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Case:
    """What determines the bits of a run; each draws random numbers in the model (dropout) and in the data."""

    precision: str = "fp32"
    tokens: bool = False  # micro-batches weigh their number of tokens, some nothing
    samples: int = 53
    batch_size: int = 3
    micro_batches: int = 8
    clip_norm: float | None = None
    workers: int = 0
    log_every: int = 1
    evaluate: bool = True
    limit: int | None = None  # of the evaluation, over all ranks
    invariant: bool = True


class Ragged(Dataset[Any]):
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


def loss_fn(model, batch):
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-1, reduction="sum")
    loss = loss / count_tokens(batch) if count_tokens(batch) else loss
    return loss, {"largest": logits.detach().abs().max()}


def count_tokens(batch):
    return int((batch[:, 1:] >= 0).sum())


def predict(model, batch):
    """Logits that are perturbed at random, and targets."""
    logits = model(batch[:, :-1])
    return logits.flatten(0, 1).double() + torch.rand(()), batch[:, 1:].flatten().clamp_min(0)


def metrics():
    """Counts, sums of floats, and what is computed from such."""
    precision, recall = Precision(average=False), Recall(average=False)
    return {
        "accuracy": Accuracy(),
        "loss": Loss(nn.functional.cross_entropy),
        "spread": Average(lambda output: output[0].std()),
        "squared": MeanSquaredError(lambda output: (output[0].amax(dim=1), output[1].double())),
        "f1": (precision * recall * 2 / (precision + recall + 1e-20)).mean(),
    }


def start(folder, ranks, case, kill_at):
    """Train on so many ranks, each a process, from the newest checkpoint in ``folder``.

    Args:
        kill_at: all ranks are killed once this iteration has ended.
    """
    return on_ranks(Path(folder), ranks, lambda rank: train(Path(folder), Case(**case), kill_at))


def train(folder, case, kill_at=None):
    """The run, to its end; rank 0 writes what it ends with."""
    torch.manual_seed(11 + agreement.rank())  # other weights and random numbers on each rank
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = model
    if agreement.world_size() > 1 and (not case.invariant or case.tokens):  # DDP's own module may be given
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    update = Update(
        wrapped,
        optimizer,
        loss_fn,
        precision=case.precision,
        clip_norm=case.clip_norm,
        weight_fn=count_tokens if case.tokens else None,
        rank_invariant=case.invariant,
    )
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
    if kill_at is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=kill_at), _kill)
    gradients = hashlib.sha256()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        gradients.update(digest([each.grad for each in model.parameters()]).encode())

    data = loader(Ragged(case.samples), case.batch_size, shuffle=True, seed=3, num_workers=case.workers)
    trainer.run(data, max_epochs=3)
    if agreement.rank() == 0:
        held = {"model": digest(model.state_dict()), "optimizer": digest(optimizer.state_dict())}
        held["gradients"] = gradients.hexdigest()  # of this process
        (folder / "end.json").write_text(json.dumps(held))


def _kill():
    agreement.wait_for_all()
    os.killpg(0, signal.SIGKILL)


def digest(value):
    """SHA-256 of the names and bytes of nested states."""
    found = hashlib.sha256()

    def add(name, leaf):
        if isinstance(leaf, dict):
            for key, each in leaf.items():
                add(f"{name}/{key}", each)
        elif isinstance(leaf, list | tuple):
            for key, each in enumerate(leaf):
                add(f"{name}/{key}", each)
        else:
            found.update(f"{name}:".encode())
            found.update(leaf.numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode())

    add("", value)
    return found.hexdigest()


def end_of(folder):
    """What a completed run ends with: digests, and every line of its log."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    held = json.loads((folder / "end.json").read_text())
    return held | {"lines": lines}


def arguments(folder, ranks, case, kill_at=None):
    """What ``START`` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder), ranks, asdict(case), kill_at


def matrix():
    """Every combination of what the promise names; each also has dropout, augmentation, evaluations and short tails."""
    for precision, tokens, clip_norm, micro_batches in itertools.product(
        ("fp32", "bf16", "fp16"), (False, True), (None, 0.5), (4, 6, 8)
    ):
        workers = 2 if (tokens, micro_batches) == (True, 6) else 0
        yield Case(precision, tokens, clip_norm=clip_norm, micro_batches=micro_batches, workers=workers, limit=9)
