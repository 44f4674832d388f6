"""An evaluation whose batches and sums are the same on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ignite import metrics as ignite_metrics
from ignite.engine import Engine, Events
from ignite.metrics import Metric
from torch import Tensor

from ignite_engine import rng
from ignite_engine.checkpoint.states.metrics import inner_metrics, metrics_of
from ignite_engine.data.sampler import Dealing, ResumableSampler
from ignite_engine.ranks import agreement, mesh
from ignite_engine.ranks.tree_sum import TreeSum
from ignite_engine.update.device import device_of

Sums = list[dict[str, Any]]

SUMMED: tuple[type[Metric], ...] = (
    ignite_metrics.Accuracy,
    ignite_metrics.Average,
    ignite_metrics.ConfusionMatrix,
    ignite_metrics.CosineSimilarity,
    ignite_metrics.Entropy,
    ignite_metrics.GeometricAverage,
    ignite_metrics.KLDivergence,
    ignite_metrics.Loss,
    ignite_metrics.MeanAbsoluteError,
    ignite_metrics.MeanPairwiseDistance,
    ignite_metrics.MeanSquaredError,
    ignite_metrics.Precision,
    ignite_metrics.PSNR,
    ignite_metrics.Recall,
    ignite_metrics.TopKCategoricalAccuracy,
)
"""Metrics that are functions of sums over the samples; also what is computed from such by arithmetic."""


def dealing_of(data: Any, limit: int | None) -> Dealing | None:
    """How the first ``limit`` batches of ``data`` are dealt to the ranks, in contiguous shares.

    Returns:
        None: its order is not ours to deal.
    """
    if not isinstance(getattr(data, "sampler", None), ResumableSampler):
        return None
    samples, size = data.sampler.data_length(), data.batch_size
    total = samples // size if data.drop_last else -(-samples // size)
    evaluated = total if limit is None else min(limit, total)
    first, end = (round(evaluated * (mesh.data_rank() + at) / mesh.data_size()) for at in (0, 1))
    return Dealing(size, total, first, end)


def unsummed(evaluator: Engine) -> list[str]:
    """Names of the metrics of ``evaluator`` that are not functions of sums alone, so that bits may vary."""
    return [
        name
        for name, metric in metrics_of(evaluator).items()
        if not all(isinstance(inner, (*SUMMED, ignite_metrics.MetricsLambda)) for inner in inner_metrics(metric))
    ]


class InvariantSums:
    """Sums the metrics of ``evaluator`` over batches by one tree, the same on any number of ranks.

    Args:
        dealing: which batches each rank evaluates: a contiguous share.
    """

    def __init__(self, evaluator: Engine, dealing: Dealing) -> None:
        self._evaluator, self._dealing = evaluator, dealing
        found = {id(inner): inner for metric in metrics_of(evaluator).values() for inner in inner_metrics(metric)}
        self._metrics = [metric for metric in found.values() if isinstance(metric, SUMMED)]

    @contextmanager
    def collecting(self, *, shares_after_the_last: bool) -> Iterator[None]:
        """While the evaluator runs; a collective after the last batch of each rank.

        Args:
            shares_after_the_last: else :meth:`share` is called when no rank has a batch, until when they exchange.

        What it draws at random is a function of the batch and of the generators now, which are the same on every rank.
        """
        self._shares_after_the_last = shares_after_the_last
        self._batch, self._seed = self._dealing.first, torch.initial_seed()
        self._tree: TreeSum[Sums] = TreeSum(_added)
        on = self._evaluator.add_event_handler
        with on(Events.ITERATION_STARTED, self._draw), on(Events.ITERATION_COMPLETED, self._collect):
            yield

    def _draw(self) -> None:
        model = getattr(self._evaluator, "model", None)
        device = torch.device("cpu") if model is None else device_of(model)
        rng.seed_device(rng.mix(self._seed, self._batch), device)

    def _collect(self) -> None:
        """Take each metric's sums over one batch out of it."""
        sums: Sums = []
        for metric in self._metrics:
            sums.append({name: getattr(metric, name) for name in metric._state_dict_all_req_keys})
            metric.reset()
        self._tree.push((self._batch, 0), sums)
        self._batch += 1
        if self._batch == self._dealing.end and self._shares_after_the_last:
            self.share()

    def share(self) -> None:
        """Give each metric its sums over all batches; a collective."""
        rows = agreement.gather_objects([(node, _on_host(sums)) for node, sums in self._tree.nodes])
        tree: TreeSum[Sums] = TreeSum(_added)
        for node, sums in itertools.chain(*rows):
            tree.push(node, sums)
        for metric, total in zip(self._metrics, tree.total(), strict=True):
            for name, value in total.items():
                # metrics add up over ranks by themselves: one rank has all, the others nothing
                own = value if agreement.rank() == 0 else _nothing(value)
                device = getattr(getattr(metric, name), "device", metric._device)
                setattr(metric, name, own.to(device) if isinstance(own, Tensor) else own)


def _added(left: Sums, right: Sums) -> Sums:
    return [
        {name: _sum(first[name], second[name]) for name in first} for first, second in zip(left, right, strict=True)
    ]


def _sum(left: Any, right: Any) -> Any:
    return left or right if isinstance(left, bool) else left + right  # flags: it has been updated


def _nothing(value: Any) -> Any:
    """What a rank without a part adds to a sum; not ``value * 0``, which is NaN where a sum is infinite."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return value if isinstance(value, bool) else type(value)()


def _on_host(sums: Sums) -> Sums:
    return [
        {name: value.cpu() if isinstance(value, Tensor) else value for name, value in sums_of_metric.items()}
        for sums_of_metric in sums
    ]
