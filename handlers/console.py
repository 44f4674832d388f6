"""What a person watches of a run: which values, rounded for reading, and where they are printed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ignite_engine.text import short

RATES = ("throughput/tokens_per_s", "throughput/samples_per_s", "throughput/steps_per_s")
_NOT_SHOWN = ("iteration", "epoch", "grad_norm", "lr", "memory", "throughput", "time")
"""Names, or what comes before a slash in them."""
logger = logging.getLogger(__name__)


def shown(values: Mapping[str, Any], keys: Sequence[str] | None = None) -> list[str]:
    """Names and numbers to be read: ``loss 0.1235``.

    Args:
        values: by name; lists and words are not shown.
        keys: in this order, exact or as patterns (``val/*``); ``rate`` is the throughput: tokens, samples or steps per
            second, the first that there is. None: ``loss``, the update's other values, evaluations, ``lr`` and
            ``rate``; neither ``grad_norm`` nor memory, times and the rates of further parameter groups.
    """
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    rate = [name for name in RATES if name in numbers][:1]
    if keys is None:
        group = {name: name.partition("/")[0] for name in numbers}
        results = [name for name in numbers if group[name] not in _NOT_SHOWN]
        keys = ["loss", *results, "lr", "rate"]
    names = [
        name
        for key in keys
        for name in (rate if key == "rate" else numbers)
        if key in ("rate", name) or fnmatchcase(name, key)
    ]
    return [
        f"{name.removeprefix('throughput/').replace('_per_s', '/s') if name in RATES else name} {short(numbers[name])}"
        for name in dict.fromkeys(names)
    ]


class Stream:
    """``stdout`` or ``stderr``; a closed terminal, or a pipe without a reader, does not end the training."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._gone = False

    def write(self, text: str) -> None:
        if self._gone:
            return
        stream = getattr(sys, self.name)
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError) as error:
            self._gone = True
            logger.warning("Progress is no longer shown, as %s is gone: %s. Training continues.", self.name, error)

    @property
    def is_terminal(self) -> bool:
        stream = getattr(sys, self.name)
        return not stream.closed and bool(stream.isatty())
