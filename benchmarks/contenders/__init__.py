"""The contenders by name. Each is there twice, bare and full, so that neither has branches for the other setting.

bare: fp32, every micro-batch is an optimizer step, nothing else.
full: bf16 autocast, 4 micro-batches to a step, clipping, an LR schedule per step, and the mean loss logged every 48
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.contenders import cheapest, ignite_engines, ours, plain, tutorial
from benchmarks.workload import Workload

Contender = Callable[[Workload], None]

CONTENDERS: Mapping[str, Mapping[str, Contender]] = {
    "bare": {
        "plain": plain.bare,
        "tutorial": tutorial.bare,
        "cheapest": cheapest.bare,
        "ignite": ignite_engines.bare,
        "ignite+10": partial(ignite_engines.bare, handlers=10),
        "supervised": ignite_engines.supervised_bare,
        "ours": ours.bare,
        "ours+10": partial(ours.bare, handlers=10),
        "ours+100": partial(ours.bare, handlers=100),
        "ours+10real": partial(ours.bare, real=True),
    },
    "full": {
        "plain": plain.full,
        "tutorial": tutorial.full,
        "cheapest": cheapest.full,
        "own casts": partial(cheapest.full, shared_casts=False),
        "ignite": ignite_engines.full,
        "ignite+10": partial(ignite_engines.full, handlers=10),
        "supervised": ignite_engines.supervised_full,
        "ours": ours.full,
        "ours+10": partial(ours.full, handlers=10),
        "ours+100": partial(ours.full, handlers=100),
        "ours+10real": partial(ours.full, real=True),
    },
}
