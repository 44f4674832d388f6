"""Click-through rates from a stream of windows: hashed sparse features, dense ones, and the dot products between them.

The task of ``configs/click_stream.yaml``. A seeded generator makes the windows, so what is reachable is known: each
sample has the logit that it was drawn from, and the part of it that is linear in the features. Every window is
evaluated before it is trained on. ``python examples/click_stream.py DIRECTORY`` writes the windows as files instead,
which ``task_options.directory`` reads, while they come if need be.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from ignite.metrics import Metric
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from ignite_engine import Task, Windows
from ignite_engine.ext.sparse import hash_ids
from ignite_engine.ext.windows import Files

IDS = (10, 20, 50, 100, 300, 1000)  # different ids of each sparse feature; their frequencies fall as 1 / rank
DENSE = 4  # dense features
LATENT = 2  # numbers of an id, whose products with its neighbour's are the part that is not linear
LINEAR, NOT_LINEAR, BASE = 1.35, 0.58, -1.35  # of the logit: standard deviations of its parts, and its mean
CURVED = 0.2  # share of the part that is not linear which is a square of a dense feature

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Options:
    """The config's ``task_options``."""

    windows: int = 90
    samples: int = 100_000  # in a window
    drift: float = 0.0  # radians by which what an id means turns from window to window
    seed: int = 0  # of the generator; not the run's seed
    directory: str | None = None  # read the windows from files there
    rows: int = 1 << 16  # of the table that all sparse features share, by hash
    width: int = 4  # features of an id in the dot products
    hidden: int = 64  # of the last layers

    def __post_init__(self) -> None:
        for name in ("windows", "samples", "rows", "width", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")


class Generator:
    """Makes windows; each is a function of the options and its number.

    The logit of a click is ``BASE`` + ``LINEAR`` * (a sum over the ids and the dense features) + ``NOT_LINEAR`` * (a
    sum of products of neighbouring ids, and a square of a dense feature), both sums with variance 1. The second has
    mean 0 whatever one id or dense feature is, so the first is the best linear model there is.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        draw = np.random.default_rng(options.seed)
        self.frequencies = [1 / np.arange(1, count + 1) ** 1.05 for count in IDS]
        self.frequencies = [each / each.sum() for each in self.frequencies]
        # two of each: what they turn from and to
        self.effects = [_standard(draw.normal(size=(2, len(p), 1)), p) for p in self.frequencies]
        self.latent = [_standard(draw.normal(size=(2, len(p), LATENT)), p) for p in self.frequencies]
        self.dense_effects = draw.normal(size=DENSE)
        self.dense_effects /= np.linalg.norm(self.dense_effects)

    def __call__(self, number: int) -> dict[str, np.ndarray[Any, Any]]:
        """Columns: raw ``ids`` (int64), ``dense``, ``click`` (0 or 1), and the logits ``linear`` and ``optimum``."""
        count, angle = self.options.samples, self.options.drift * number
        draw = np.random.default_rng([self.options.seed, number])
        ranks = [np.searchsorted(p.cumsum()[:-1], draw.random(count), side="right") for p in self.frequencies]
        dense = draw.normal(size=(count, DENSE))

        def now(values: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
            turned = [np.cos(angle) * start + np.sin(angle) * end for start, end in values]
            return [each[rank] for each, rank in zip(turned, ranks, strict=True)]

        linear = 0.5 * dense @ self.dense_effects
        linear += np.sqrt(0.75 / len(IDS)) * sum(each[:, 0] for each in now(self.effects))
        latent = now(self.latent)
        products = sum((one * other).sum(1) for one, other in pairwise(latent))
        curved = (dense[:, 0] ** 2 - 1) / np.sqrt(2)
        rest = np.sqrt((1 - CURVED) / LATENT / (len(IDS) - 1)) * products + np.sqrt(CURVED) * curved
        linear = BASE + LINEAR * linear
        optimum = linear + NOT_LINEAR * rest
        return {
            # any numbers could stand for the ids, as those of users and pages do
            "ids": np.stack(ranks, axis=1) * 7_919_999_983 + 10**12,
            "dense": dense.astype(np.float32),
            "click": (draw.random(count) < 1 / (1 + np.exp(-optimum))).astype(np.float32),
            "linear": linear.astype(np.float32),
            "optimum": optimum.astype(np.float32),
        }


def _standard(values: np.ndarray[Any, Any], frequencies: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values ``(2, ids, n)`` with mean 0 and variance 1 over the ids as they occur."""
    weights = frequencies[None, :, None]
    values = values - (weights * values).sum(1, keepdims=True)
    return values / np.sqrt((weights * values**2).sum(1, keepdims=True))  # type: ignore[no-any-return]  # of untyped arrays


class Clicks(Dataset[Batch]):
    """A window's samples, read a batch at a time."""

    def __init__(self, columns: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self.columns = {name: torch.from_numpy(column) for name, column in columns.items()}

    def __len__(self) -> int:
        return len(self.columns["click"])

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}

    def __getitems__(self, indices: list[int]) -> Batch:
        rows = torch.tensor(indices)
        return {name: column[rows] for name, column in self.columns.items()}


def as_it_is(batch: Any) -> Any:
    """In the place of a collate function: :class:`Clicks` gives whole batches."""
    return batch


def dot_products(vectors: Tensor) -> Tensor:
    """Of vectors ``(batch, n, width)`` the products of each two, ``(batch, n * (n - 1) / 2)``.

    Source: Naumov et al. 2019, arXiv 1906.00091 (DLRM), the interaction of features.
    """
    count = vectors.shape[1]
    one, other = torch.tril_indices(count, count, -1)
    products: Tensor = torch.bmm(vectors, vectors.transpose(1, 2))[:, one, other]
    return products


class Network(nn.Module):
    """A batch to logits ``(batch,)``: a linear model of the ids, and layers over the dot products of all features."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width, features = options.width, len(IDS) + 1
        self.table = nn.Embedding(options.rows, width + 1, sparse=True)  # the last is an id's own weight
        nn.init.normal_(self.table.weight, std=0.15)
        self.table.weight.data[:, -1] = 0.0
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, width))
        inputs = width + features * (features - 1) // 2
        self.top = nn.Sequential(nn.Linear(inputs, options.hidden), nn.ReLU(), nn.Linear(options.hidden, 1))

    def forward(self, batch: Batch) -> Tensor:
        ids, dense = batch["ids"], self.bottom(batch["dense"])
        salt = torch.arange(ids.shape[1], device=ids.device)  # the same number is another id in another column
        found = self.table(hash_ids(ids, self.table.num_embeddings, salt))
        products = dot_products(torch.cat([dense[:, None], found[..., :-1]], dim=1))
        logits: Tensor = self.top(torch.cat([dense, products], dim=1)).squeeze(1) + found[..., -1].sum(1)
        return logits


class ClickMetrics(Metric):
    """Of logits ``(batch, 3)`` (the model's, ``linear``, ``optimum``) and clicks: what the model is worth.

    ``auc``; ``normalized_entropy``: the log loss over that of always predicting the share of clicks (He et al. 2014);
    ``calibration``: predicted over actual clicks; ``linear_auc`` and ``optimum_auc``, what the generator's own linear
    part and its whole logit reach; ``gap_closed``: where between the two the model's AUC is, 0 to 1.

    AUCs are those of logits rounded to 1 / 512: counts of them are all that is kept, and summed over ranks.
    """

    BINS = 1 << 14
    _state_dict_all_req_keys = ("_counts", "_sums")

    def reset(self) -> None:
        self._counts = torch.zeros(3, 2, self.BINS, dtype=torch.int64)
        self._sums = torch.zeros(4, dtype=torch.float64)  # log loss, predicted clicks, clicks, samples

    def update(self, output: Sequence[Tensor]) -> None:
        logits, clicks = output[0].detach().cpu().double(), output[1].detach().cpu().double()
        bins = (logits * 512).round().long().add_(self.BINS // 2).clamp_(0, self.BINS - 1)
        for scorer in range(3):
            places = bins[:, scorer] + self.BINS * clicks.long()
            self._counts[scorer] += torch.bincount(places, minlength=2 * self.BINS).view(2, -1)
        loss = functional.binary_cross_entropy_with_logits(logits[:, 0], clicks, reduction="sum")
        predicted = logits[:, 0].sigmoid().sum()
        self._sums += torch.stack([loss, predicted, clicks.sum(), torch.tensor(float(len(clicks)))])

    def compute(self) -> dict[str, float]:
        import ignite.distributed as idist

        counts, sums = self._counts, self._sums
        if idist.get_world_size() > 1:
            counts, sums = cast(Tensor, idist.all_reduce(counts.clone())), cast(Tensor, idist.all_reduce(sums.clone()))
        (loss, predicted, clicks, samples), share = sums.tolist(), float(sums[2] / sums[3])
        entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share))
        model, linear, optimum = (area_under_curve(each) for each in counts.double())
        return {
            "auc": model,
            "normalized_entropy": loss / samples / entropy,
            "calibration": predicted / clicks,
            "linear_auc": linear,
            "optimum_auc": optimum,
            "gap_closed": (model - linear) / (optimum - linear),
        }


def area_under_curve(counts: Tensor) -> float:
    """Of how many samples without and with a click, ``(2, bins)``, have each score: P(a click scores higher)."""
    without, clicked = counts
    below = without.cumsum(0) - without / 2
    return float((clicked * below).sum() / (clicked.sum() * without.sum()))


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The three logits ``(batch, 3)`` and the clicks ``(batch,)``."""
    return torch.stack([model(batch).float(), batch["linear"], batch["optimum"]], dim=1), batch["click"]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Log loss in nats per sample."""
    return functional.binary_cross_entropy_with_logits(model(batch), batch["click"])


def stream(options: Options) -> tuple[Windows, Callable[[int], Any]]:
    """The windows, and what makes one by its number."""
    generator = Generator(options)

    @lru_cache(maxsize=1)  # a window is opened to be evaluated, and again to be trained on
    def opened(window: int | Path) -> Clicks:
        return Clicks(generator(window) if isinstance(window, int) else np.load(window))

    def open_window(window: int | Path) -> Any:
        return opened(window)

    if options.directory is None:
        return Windows(range(options.windows), open_window), open_window
    return Windows(Files(options.directory, "window_*.npz", end="done"), open_window, wait_s=600), open_window


def build(options: Mapping[str, Any]) -> Task:
    """The task; ``options`` are the fields of :class:`Options`.

    Raises:
        TypeError: an unknown option.
        ValueError: an option with an invalid value.
    """
    chosen = Options(**options)
    model = Network(chosen)
    windows, make = stream(chosen)
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("table.")]
    return Task(
        model=model,
        loss_fn=loss_fn,
        train_set=windows,
        test_sets={"next": make(chosen.windows)},
        predict=predict,
        metrics={"clicks": ClickMetrics()},
        parameter_groups={"tables": [model.table.weight], "dense": dense},
        collate_fn=as_it_is,
    )


def write(directory: Path, options: Options, every_s: float = 0.0) -> None:
    """Write the windows as ``window_0000.npz`` and so on, one every ``every_s`` seconds, then ``done``."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = Generator(options)
    for number in range(options.windows):
        unfinished = directory / "unfinished"
        with unfinished.open("wb") as file:
            np.savez(file, **generator(number))  # type: ignore[arg-type]  # an array cannot be its other argument
        os.replace(unfinished, directory / f"window_{number:04d}.npz")
        time.sleep(every_s)
    (directory / "done").touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the windows of a click stream as files.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--windows", type=int, default=Options.windows)
    parser.add_argument("--samples", type=int, default=Options.samples)
    parser.add_argument("--drift", type=float, default=Options.drift, help="radians from window to window")
    parser.add_argument("--every", type=float, default=0.0, help="seconds from window to window")
    given = parser.parse_args()
    write(given.directory, Options(given.windows, given.samples, given.drift), given.every)
