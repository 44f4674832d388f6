"""Errors of ``fit`` as a user needs them: a refusal is its one line, any other error has the user's frames."""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

import ignite
import torch

import ignite_engine
from ignite_engine.checkpointing import CheckpointError
from ignite_engine.config import ConfigError
from ignite_engine.errors import LaunchError, NotExact, NotFinite, RanksDiffer, StateMismatch
from ignite_engine.run_directory import RunDirectoryInUse

P = ParamSpec("P")
T = TypeVar("T")

_REFUSALS = (
    *(ConfigError, StateMismatch, NotExact, RunDirectoryInUse, CheckpointError, LaunchError, NotFinite, RanksDiffer),
    *(ValueError, TypeError, RuntimeError, OSError),
)
"""What the engine raises in a sentence that needs no traceback."""
_FOLDERS = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (ignite_engine, ignite))
_HANDLERS = str(Path(ignite_engine.__file__).resolve().parents[1] / "handlers") + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_FRAMES_IN_A_WORKER = re.compile(
    rf'^  File "(?:{"|".join(map(re.escape, (*_FOLDERS, _HANDLERS)))})[^\n]*\n(?:    [^\n]*\n)*', flags=re.MULTILINE
)
_RAISE = dis.opmap["RAISE_VARARGS"]


def readable(function: Callable[P, T]) -> Callable[P, T]:
    """Let errors leave ``function`` without the frames of the engine in between; the run's log has them.

    What the engine itself refuses is left without a traceback and without the handler that found it. A defect of the
    engine keeps all of its traceback.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            shorten(error)
            raise

    return call


def shorten(error: BaseException) -> None:
    """Cut the tracebacks of an error and of those that it was raised from."""
    frames = list(_frames(error.__traceback__))
    if frames and _is_refusal(error, frames[-1]):
        error.__traceback__ = None
        error.__suppress_context__ = True
        vars(error).pop("__notes__", None)
        if error.__cause__ is not None and not any(map(_is_of_the_user, _frames(error.__cause__.__traceback__))):
            error.__cause__ = None
    else:
        error.__traceback__ = _users(error) or error.__traceback__
        if error.args and isinstance(text := error.args[0], str) and "in DataLoader worker process" in text:
            error.args = (_FRAMES_IN_A_WORKER.sub("", text), *error.args[1:])
    if error.__cause__ is not None:
        shorten(error.__cause__)


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_refusal(error: BaseException, innermost: TracebackType) -> bool:
    """Whether a ``raise`` of the engine has raised it, and not what a call did by itself, which may be a defect."""
    code, at = innermost.tb_frame.f_code, innermost.tb_lasti
    return isinstance(error, _REFUSALS) and _is_ours(innermost) and code.co_code[at] == _RAISE


def _is_ours(traceback: TracebackType) -> bool:
    file = traceback.tb_frame.f_code.co_filename
    return file.startswith((*_FOLDERS, _HANDLERS))


def _is_of_the_user(traceback: TracebackType) -> bool:
    return not _is_ours(traceback) and not traceback.tb_frame.f_code.co_filename.startswith(_TORCH)


def _users(error: BaseException) -> TracebackType | None:
    """The traceback without the engine's frames, from the first that is not; None: it ends in the engine."""
    frames = list(_frames(error.__traceback__))
    if not frames or _is_ours(frames[-1]):
        return None
    kept: TracebackType | None = None
    for frame in reversed([frame for frame in frames if not _is_ours(frame)]):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept
