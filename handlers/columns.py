"""What a person watches of a run, in one line: which values, in which order, rounded for reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

RATES = ("throughput/tokens_per_s", "throughput/samples_per_s", "throughput/steps_per_s")
_MACHINE = ("memory", "throughput", "time", "lr", "ids")
WIDEST = 9
"""Characters of a number as :func:`short` writes it."""


class Columns:
    """Chooses what is shown of ``state.metrics``, of all that has been written so far.

    Args:
        keys: in this order, exact or as patterns (``val/*``); ``rate`` is the throughput: tokens, samples or steps per
            second, the first of them that is written. None: ``loss``, the update's other values, evaluations, ``lr``
            and ``rate``; neither ``grad_norm`` nor memory, times and the rates of further parameter groups.
    """

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self.keys = None if keys is None else [key for key in keys if key not in ("iter", "iteration", "epoch")]
        self.rate: str | None = None
        """The throughput that will be written, where that is known before."""
        self._written: dict[str, None] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Note which values there are; those that are not one number have no column."""
        self._written |= {name: None for name, value in values.items() if not isinstance(value, list | dict)}

    def chosen(self) -> list[str]:
        """The keys to show, in their order."""
        rate = [*(key for key in RATES if key in self._written), *filter(None, [self.rate])][:1]
        if self.keys is None:
            results = _parts_after_their_totals([key for key in self._written if _is_result(key)])
            return [*_known(self._written, "loss"), *results, *_known(self._written, "lr"), *rate]
        chosen: list[str] = []
        for key in self.keys:
            if key == "rate":
                chosen += rate or ["rate"]
            elif any(sign in key for sign in "*?["):
                chosen += [column for column in self._written if fnmatchcase(column, key)]
            else:
                chosen.append(key)
        return list(dict.fromkeys(chosen))

    def fitting(self, room: int, gap: int = 2) -> list[str]:
        """The columns of :meth:`chosen` that fit into ``room`` characters; what the user chose is always shown."""
        chosen = self.chosen()
        if self.keys is not None:
            return chosen
        # a part, as generator/loss/real, gives way to its total and to what is measured besides
        kept: set[str] = set()
        for key in sorted(chosen, key=lambda key: (_is_result(key), key.rpartition("/")[0] in chosen)):
            room -= gap + width_of(key)
            if room >= 0:
                kept.add(key)
        return [key for key in chosen if key in kept]


def head_of(key: str) -> str:
    """The name of a column: ``samples/s`` for a throughput, else the key."""
    return key.removeprefix("throughput/").replace("_per_s", "/s") if key in RATES else key


def width_of(key: str) -> int:
    return max(len(head_of(key)), WIDEST)


def short(value: Any, key: str = "") -> str:
    """A value in at most 9 characters if it is a number: ``0.0003``, ``1.234e-05``, ``12346``; rates as ``12.3k``."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key in RATES:
        return _thousands(value)
    whole = isinstance(value, int) or 1000 <= abs(value) < 1e6
    text = f"{value:.0f}" if whole else f"{value:.4g}"
    return text if len(text) <= WIDEST else f"{value:.3g}"


def _thousands(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5 or unit == "G":
            break
        value /= 1000
    return f"{value:#.3g}".rstrip(".") + unit


def _parts_after_their_totals(keys: Sequence[str]) -> list[str]:
    """``generator/loss/real`` after ``generator/loss``, wherever it was first written."""
    ordered: dict[str, None] = {}
    for key in keys:
        if key.rpartition("/")[0] not in keys:
            ordered |= dict.fromkeys([key, *(part for part in keys if part.rpartition("/")[0] == key)])
    return [*ordered, *(key for key in keys if key not in ordered)]


def _known(written: Mapping[str, None], key: str) -> list[str]:
    return [key] if key in written else []


def _is_result(key: str) -> bool:
    """Whether it is an evaluation's, or an own value of the update."""
    group, slash, _ = key.partition("/")
    return key not in ("epoch", "loss", "lr", "grad_norm") and not (slash and group in _MACHINE)
