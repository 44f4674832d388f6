"""What a program in plain torch is to do, as values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ignite_engine.replay.eject_code import Code

LOG_EVERY = 50
"""Updates from one printed loss to the next, where the run does not count them."""
_WIDTH = 118


@dataclass(frozen=True)
class Rate:
    """The learning rate over the rate of the optimizer, as code."""

    description: str
    lines: tuple[str, ...]
    """The body of a function of ``update``, which counts from 0."""


@dataclass(frozen=True)
class Optimizing:
    """An optimizer of the run, as code."""

    made: str | None
    """The call that makes it; None: the task does."""
    rate: Rate | None
    """None: it stays as it is."""


@dataclass(frozen=True)
class Plain:
    """What a program in plain torch is to do."""

    title: str
    task: Code
    parts: str
    """The call that makes the parts of the run."""
    is_weighed: bool
    """``weight_fn`` is among the parts."""
    options: Mapping[str, Any] | None
    seed: int
    order_seed: int
    model_is_made_first: bool
    """The generators are seeded for the making of the model, too."""
    iterations: int | None
    """None: until the windows end."""
    epochs: int | None
    per_epoch: int | None
    batch_size: int
    drop_last: bool
    shuffle: bool
    workers: int
    data: Literal["samples", "tensors", "loader", "windows"]
    reads_batches: bool
    steps: int | None
    collate: str | None
    """What makes a batch of samples; None: torch's own."""
    losses: Literal["one", "mapping", "tuple"]
    has_extras: bool
    """The loss function returns a pair, of which the second is only reported."""
    optimizers: Sequence[Optimizing]
    own_optimizer: str | None
    """The expression of what the task makes; None: they are made from the config."""
    has_several: bool
    scheduler_steps: Literal["step", "epoch"] | None
    clip_norm: float | None
    trains_all: bool
    """The optimizers hold every parameter of the model that has a gradient."""
    precision: Literal["fp32", "bf16", "fp16"]
    scaler: Mapping[str, Any]
    device: str
    deterministic: bool
    matmul_precision: str
    threads: int | None
    log_every: int
    left_out: Sequence[str] = ()
    copied: Sequence[Code] = ()


def literal(value: Any, width: int = _WIDTH) -> str:
    """Plain nested values as code, in several lines where one is longer than ``width``."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list | tuple):
        return repr(value)
    elements = [literal(element, width - 4) for element in value]
    if isinstance(value, dict):
        elements = [
            f"{key}: {literal(element, width - 4)}" for key, element in zip(elements, value.values(), strict=True)
        ]
    left, right = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}[type(value)]
    line = ", ".join(elements) + ("," if isinstance(value, tuple) and len(elements) == 1 else "")
    if len(line) + 2 <= width and "\n" not in line:
        return f"{left}{line}{right}"
    inner = ",\n".join(elements).replace("\n", "\n    ")
    return f"{left}\n    {inner},\n{right}"
