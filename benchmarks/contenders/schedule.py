"""The LR schedule of the full setting: linear warm-up, then a cosine to zero."""

from __future__ import annotations

import math

from benchmarks.workload import TOTAL, WARMUP


def lr_factor(step: int) -> float:
    """The factor of the base LR for update ``step``, counted from 0."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - WARMUP) / (TOTAL - WARMUP))))
