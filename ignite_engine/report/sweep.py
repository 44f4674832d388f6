"""Several runs as one table of text, the best first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ignite_engine.checkpointing.retention import usual_mode
from ignite_engine.errors import did_you_mean, shortened
from ignite_engine.report.pages import differing, duration, names_of, text_of
from ignite_engine.report.records import Record
from ignite_engine.report.timeline import seconds
from ignite_engine.run_directory import flat
from ignite_engine.text import in_columns, short

SETTINGS = 8
"""Columns of settings; a table of more is not read."""


class NotLogged(ValueError):
    """No run has logged the metric; one line that names those which there are."""


def ordered(runs: Sequence[Record], key: str, mode: str | None = None) -> list[Record]:
    """The runs by their best value of a metric, the best first, those without it last.

    Args:
        mode: ``min`` or ``max``; None: as the first run that followed the metric, or else as its name says.

    Raises:
        NotLogged: none of them has it.
    """
    known = dict.fromkeys(name for run in runs for name in run.series)
    if key not in known:
        raise NotLogged(f"--sort: got {key!r}, which no run has logged{did_you_mean(key, known)}")
    mode = _mode(runs, key, mode)
    sign = 1 if mode == "min" else -1
    return sorted(runs, key=lambda run: sign * best[1] if (best := run.best(key, mode)) else math.inf)


def sweep_table(runs: Sequence[Record], key: str, mode: str | None = None) -> list[str]:
    """A line for each run: what its config has of its own, best value and where, last value, time, status."""
    mode = _mode(runs, key, mode)
    settings, configs = differing(runs), [flat(run.config) for run in runs]
    settings = [setting for setting in settings if setting != "run.name"]
    shown = settings[:SETTINGS]
    rows = [("run", *map(_last_words(shown).__getitem__, shown), f"{key} ({mode})", "at", "last", "time", "status")]
    for run, name, config in zip(runs, names_of(runs), configs, strict=True):
        best, last = run.best(key, mode), run.last(key)
        value, at = ("-", "-") if best is None else (short(best[1], 5), f"{best[0]:,}")
        took = "-" if (spent := seconds(run)) is None else duration(spent)
        given = [text_of(config[setting]) if setting in config else "-" for setting in shown]
        rows.append((name, *given, value, at, "-" if last is None else short(last, 5), took, run.status))
    more = settings[SETTINGS:]
    return [*in_columns(rows), *([f"{len(more)} more settings differ: {shortened(more, 5)}"] if more else [])]


def _mode(runs: Sequence[Record], key: str, mode: str | None) -> str | None:
    followed = (run.followed[1] for run in runs if run.followed is not None and run.followed[0] == key)
    return mode or next(followed, None) or usual_mode(key) or "min"


def _last_words(keys: Sequence[str]) -> dict[str, str]:
    """``lr`` for ``optimizer.lr``, where no other key ends so."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}
