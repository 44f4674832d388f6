"""Decides which checkpoints are kept, from the manifests on disk alone, so that a restart changes nothing."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ignite_engine.checkpoint.manifest import Manifest
from ignite_engine.errors import check_type, is_whole


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint: its path and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def iteration(self) -> int:
        return self.manifest.iteration


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint of a run with the best value of the metric that the run follows."""

    path: Path
    value: float
    iteration: int
    metric: str

    @classmethod
    def of(cls, checkpoint: CheckpointInfo, metric: str) -> BestCheckpoint:
        return cls(checkpoint.path, checkpoint.manifest.metrics[metric], checkpoint.iteration, metric)

    def __str__(self) -> str:
        here = Path.cwd()
        path = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        return f"{self.metric} {self.value:.5g} at iteration {self.iteration}, {path}"


@dataclass(frozen=True)
class Retention:
    """Keeps the last few checkpoints, the best few and every n-th.

    Args:
        keep_last: the number of newest checkpoints, at least 1.
        keep_best: the number of best checkpoints by ``best``. Never among them are checkpoints of an earlier run in the
            folder, and those with non-finite weights or without a finite value of the metric. Of equal values the
            earlier is better.
        best: the name of a metric in the manifests; None: none is the best.
        mode: whether a small (``min``) or a large value (``max``) is good.
        keep_every: also keeps checkpoints whose iteration is a multiple of it; None: does not.

    Raises:
        TypeError: a value is of another type.
        ValueError: a count is too small, or the mode unknown.
    """

    keep_last: int = 2
    keep_best: int = 1
    best: str | None = None
    mode: Literal["min", "max"] = "min"
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_best"):
            value = getattr(self, name)
            check_type(name, value, is_whole(value), "a whole number")
        every = self.keep_every
        check_type("keep_every", every, every is None or is_whole(every), "a whole number of iterations or None")
        best = self.best
        check_type("best", best, best is None or isinstance(best, str), "the name of a metric or None")
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {self.keep_last}: the newest is always kept.")
        if self.keep_best < 0:
            raise ValueError(f"keep_best must be at least 0, got {self.keep_best}.")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got {self.mode!r}.")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every must be at least 1 iteration or None, got {self.keep_every}.")

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """The checkpoints to keep, in the order given: oldest first, sound ones only.

        The newest healthy one is kept whatever its age, so that checkpoints with non-finite weights never evict it.
        """
        old = {checkpoint.path for checkpoint in superseded(checkpoints)}
        current = [checkpoint for checkpoint in checkpoints if checkpoint.path not in old]
        healthy = [checkpoint for checkpoint in current if checkpoint.manifest.healthy]
        kept = {checkpoint.path for checkpoint in (*current[-self.keep_last :], *self.best_of(healthy), *healthy[-1:])}
        if self.keep_every is not None:
            kept |= {checkpoint.path for checkpoint in current if checkpoint.iteration % self.keep_every == 0}
        return [checkpoint for checkpoint in checkpoints if checkpoint.path in kept]

    def best_of(self, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """The best checkpoints of the run that saved the last one, best first."""
        return [] if self.best is None else ranked(of_one_run(checkpoints), self.best, self.mode)[: self.keep_best]


def ranked(checkpoints: Iterable[CheckpointInfo], metric: str, mode: str) -> list[CheckpointInfo]:
    """The checkpoints with finite weights and a finite value of ``metric``: best first, of equal ones the earlier."""
    sign = 1 if mode == "min" else -1
    healthy = [checkpoint for checkpoint in checkpoints if checkpoint.manifest.healthy]
    scores = [(sign * checkpoint.manifest.metrics.get(metric, math.nan), checkpoint) for checkpoint in healthy]
    finite = [pair for pair in scores if math.isfinite(pair[0])]
    return [checkpoint for _, checkpoint in sorted(finite, key=lambda pair: pair[0])]


def of_one_run(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """The checkpoints of the run that saved the last one; not those of earlier runs in the folder."""
    return [checkpoint for checkpoint in checkpoints if checkpoint.manifest.run_id == checkpoints[-1].manifest.run_id]


def superseded(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Checkpoints whose iteration was saved again later; a non-finite one does not supersede a healthy one."""
    newest: dict[tuple[int, bool], int] = {}
    for checkpoint in checkpoints:
        manifest = checkpoint.manifest
        for healthy in (False, manifest.healthy):  # a healthy one supersedes both kinds
            key = manifest.iteration, healthy
            newest[key] = max(manifest.sequence, newest.get(key, manifest.sequence))
    return [
        checkpoint
        for checkpoint in checkpoints
        if newest[checkpoint.iteration, checkpoint.manifest.healthy] > checkpoint.manifest.sequence
    ]


_SMALL_IS_GOOD = frozenset({"loss", "nll", "error", "err", "perplexity", "ppl", "mae", "mse", "rmse", "entropy"})
_LARGE_IS_GOOD = frozenset(
    {"acc", "top1", "top5", "f1", "precision", "recall", "auc", "auroc", "iou", "miou", "dice", "map", "bleu", "rouge"}
    | {"psnr", "ssim", "r2", "reward"}
)


def usual_mode(metric: str) -> Literal["min", "max"] | None:
    """Whether smaller or larger values are better, from the name of a metric; None: the name does not tell."""
    words = re.split(r"[^a-z0-9]+", metric.lower())
    small = any(word in _SMALL_IS_GOOD for word in words)
    large = any(word in _LARGE_IS_GOOD or word.startswith("accura") for word in words) or metric.endswith("_per_s")
    return None if small == large else "min" if small else "max"


def mode_of(metric: str, mode: Literal["min", "max"] | None, setting: str) -> Literal["min", "max"]:
    """``mode``, or the mode that the name of a metric implies.

    Args:
        setting: the argument that names the metric, for errors.

    Raises:
        ValueError: it is neither ``min`` nor ``max``; or it is None, and the name does not tell.
    """
    if mode not in (None, "min", "max"):
        raise ValueError(f"mode must be 'min' or 'max', got {mode!r}.")
    if (found := mode or usual_mode(metric)) is None:
        group, slash, name = metric.rpartition("/")
        near = difflib.get_close_matches(name.lower(), {*_SMALL_IS_GOOD, *_LARGE_IS_GOOD, "accuracy"}, 1, 0.75)
        meant = f"; did you mean '{group}{slash}{near[0]}'?" if near else "."
        raise ValueError(
            f"got {metric!r} for {setting}, a name that does not say whether smaller or larger values are better: give "
            f"mode='min' or mode='max'{meant}"
        )
    return found
