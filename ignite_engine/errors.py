"""Every error of the engine that a user may see, and how a run says that it was stopped."""

from __future__ import annotations

import difflib
import errno
import importlib
import importlib.util
import shutil
import signal as signals
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT))


class CheckpointError(Exception):
    """A checkpoint could not be written, read or deleted; the message is one line and names what, where and why.

    Attributes:
        on_all_ranks: whether every rank raises it.
    """

    on_all_ranks = False


class StateMismatch(ValueError):
    """A checkpoint's state does not fit what was built; the message is one line and names the remedy."""


class EmptyData(ValueError):
    """A dataset without a sample."""


class NotExact(ValueError):
    """A run that was to be resumable bit for bit is not; the message is one line and says which parts and why."""


class NotFinite(ArithmeticError):
    """A loss or gradient is not finite and the run ends by its policy; one line, the same on all ranks."""


class RollBack(NotFinite):
    """The run goes back to its last healthy checkpoint; ``Trainer.run()`` catches it."""


class RanksDiffer(RuntimeError):
    """Ranks that must hold the same weights do not; one line, the same on all ranks."""


def raised_by_all_ranks(error: BaseException) -> bool:
    """Whether no rank has to be told of it."""
    return isinstance(error, NotFinite | RanksDiffer) or (isinstance(error, CheckpointError) and error.on_all_ranks)


class ReplayError(ValueError):
    """A run cannot be replayed as asked for; the message is one line and names the remedy."""


class LaunchError(RuntimeError):
    """The ranks could not be started or cannot meet; the message is one line."""


def check_type(name: str, value: object, is_right: bool, expected: str) -> None:
    """Refuse an argument of another type than expected; a bool does not count as a number.

    Raises:
        TypeError: one sentence that names the argument, what is expected and what was given.
    """
    if not is_right:
        shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
        if isinstance(value, type):
            shown = f"the class {value.__name__}"
        raise TypeError(f"{name} must be {expected}, got {shown}.")


def is_whole(value: object) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a real number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def leave_out(*parts: str) -> str:
    """How to resume without a part that does not fit."""
    names = [*parts]
    fit = f"resume={{'ignore': {names}}} in fit()"
    return f"resume(ignore={names}), {fit}, or handlers.Checkpoint.resume.ignore in a config"


def require_exact(what: str, reasons: Sequence[str]) -> None:
    """Refuse what cannot be resumed exactly.

    Raises:
        NotExact: there is a reason.
    """
    if reasons:
        raise NotExact(
            f"{what} cannot be resumed bit for bit, which Checkpoint's strict asks for: {'; '.join(reasons)}. "
            "Fix that, or leave strict out."
        )


def did_you_mean(given: str, known: Iterable[str], *, limit: int = 20) -> str:
    """The end of a sentence about an unknown name: ``"; did you mean 'lr'?"``, or what is known where nothing is near.

    A name is near, too, that ends with it: ``optimizer.lr``, ``val/accuracy``.

    Args:
        given: compared without regard to case.
        known: what would have been right; ``"."`` if there is nothing.
        limit: how many of them are listed at most.
    """
    names = list(known)
    folded = {name.lower(): name for name in names}
    if near := difflib.get_close_matches(given.lower(), folded, n=1):
        return f"; did you mean '{folded[near[0]]}'?"
    if ends := [f"'{name}'" for name in names if name.lower().endswith((f".{given.lower()}", f"/{given.lower()}"))]:
        return f"; did you mean {' or '.join(ends)}?"
    return f"; known: {shortened(names, limit)}." if names else "."


def by_name(what: str, name: str, table: Mapping[str, str]) -> Any:
    """What a table of ``module:object`` has under a name; its module is imported now.

    Args:
        what: is named, such as ``accumulate``.

    Raises:
        ValueError: the table has no such name, or the module is not installed; one line.
    """
    if name not in table:
        raise ValueError(f"{what} {name!r} is not known{did_you_mean(name, table)}")
    module, _, attribute = table[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{what} {name!r} needs {module}, which is not installed.") from None


def is_there(entry: str) -> bool:
    """Whether the module of a table's ``module:object`` is installed."""
    try:
        return importlib.util.find_spec(entry.partition(":")[0]) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def metric_meant(given: str, known: Sequence[str]) -> str:
    """As :func:`did_you_mean` of a metric; the loss of an evaluation is not that of the training batches.

    Args:
        given: ``val/loss``, which is none of the run's.
        known: the run's metrics, ``loss`` among them.
    """
    name, _, metric = given.partition("/")
    if metric != "loss" or not (others := [each for each in known if each.startswith(f"{name}/")]):
        return did_you_mean(given, known)
    return (
        ": where metrics are given, the loss of an evaluation has to be one of them, such as 'loss': Loss(function of "
        f"predictions and targets); known: {shortened(others, 20)}."
    )


def shortened(names: Iterable[str], limit: int = 3) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


_LONGEST = 2000
"""Characters of a line: an error may quote a whole batch."""


def one_line(error: BaseException) -> str:
    """The error's first line, cut where it is very long; a bare type name where it has none, or cannot be printed.

    Where there was no room it says how much is free.

    Of an error that a loader's worker met it is the line of that error: torch puts its traceback into the message.
    """
    if isinstance(error, OSError) and error.strerror:
        where = [str(error.filename)] if error.filename else []
        if where and error.errno in _NO_ROOM:
            where.append(free_space(Path(where[0])))
        return f"{error.strerror} ({', '.join(where)})" if where else error.strerror
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # the error's own
        lines = []
    if not lines:
        return type(error).__name__
    lines = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..." for line in lines]
    if "in DataLoader worker process" in lines[0]:
        kind = type(error).__name__
        lines = [line for line in lines if line.partition(":")[0].rpartition(".")[2] == kind] or lines
        return lines[-1]
    return lines[0] if isinstance(error, CheckpointError) else f"{type(error).__name__}: {lines[0]}"


def shapes_of(value: object, depth: int = 3) -> str:
    """``(Tensor [8, 3] float32, Tensor [8] int64)``: what a batch or an output holds, for an error about it."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if not isinstance(value, Mapping | list | tuple) or not depth:
        return type(value).__name__
    keys = [f"{key!r}: " for key in value] if isinstance(value, Mapping) else [""] * len(value)
    elements = value.values() if isinstance(value, Mapping) else value
    shown = [f"{key}{shapes_of(element, depth - 1)}" for key, element in zip(keys, elements)]
    if len(set(shown)) == 1 and len(shown) > 3:
        shown = [f"{len(shown)} of {shown[0]}"]
    opening, closing = "{}" if isinstance(value, Mapping) else "[]" if isinstance(value, list) else "()"
    return f"{opening}{shortened(shown, 6)}{closing}"


def free_space(directory: Path) -> str:
    """Free space of the file system that holds ``directory``, or of its nearest existing parent, in MiB."""
    for candidate in (directory, *directory.parents):
        try:
            return f"{shutil.disk_usage(candidate).free / 2**20:.1f} MiB free"
        except OSError:
            continue
    return "free space unknown"


class StopRequested(BaseException):
    """Raised by a signal handler inside the loader's ``next`` only, and caught there: the group was not consumed."""


class Interrupted(SystemExit):
    """Raised by ``Trainer.run()`` when a signal has stopped the run and every rank has saved.

    ``Parallel`` and the command line also raise it for a signal before the run, when there is nothing to save.

    Args:
        signal: its number; the exit code is 128 + signal (130 for SIGINT, 143 for SIGTERM).
    """

    def __init__(self, signal: int) -> None:
        super().__init__(128 + signal)
        self.signal = signal

    def __str__(self) -> str:
        return f"interrupted by {signals.Signals(self.signal).name}"


class PeerFailed(RuntimeError):
    """Another rank failed, and this one cannot go on without it; one line that names the rank and its error."""
