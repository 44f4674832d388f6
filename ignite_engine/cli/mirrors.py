"""``checkpoints list``, ``verify``, ``pull`` and ``push`` of a mirror: a URL, or a directory elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ignite_engine.checkpointing import CheckpointError, CheckpointInfo, find_directory, find_source
from ignite_engine.checkpointing.in_use import in_use, uploads
from ignite_engine.checkpointing.layout import named_iteration, scan
from ignite_engine.checkpointing.naming import RUNS_FOLDER, is_single, split_name
from ignite_engine.checkpointing.verification import Verification
from ignite_engine.errors import did_you_mean
from ignite_engine.mirror.fetch import fetch
from ignite_engine.mirror.followed import MEASURED, measured_lines, take
from ignite_engine.mirror.held import Held, hold
from ignite_engine.mirror.options import is_url
from ignite_engine.mirror.remote import Lost, Remote, Torn
from ignite_engine.mirror.upload import Contents
from ignite_engine.mirror.waiting import Throttle, Unreachable, patiently
from ignite_engine.text import in_units

T = TypeVar("T")
_WAITS_S = 10.0
"""A push waits for so long: of a run that uploads nothing a look takes a moment."""
_PATH = "a checkpoint, a run's folder, or one of checkpoints (its last valid one), or RUN/best"
_FROM = "a mirror: a URL such as s3://bucket/run, or a directory; its newest checkpoint, or one by its name behind it"


def add_actions(action: Callable[[str, str], Any]) -> None:
    """Add what only mirrors have."""
    pull = action("pull", "fetch checkpoints of a mirror into a folder")
    pull.add_argument("where", metavar="MIRROR", help=_FROM)
    pull.add_argument("to", type=Path, metavar="DIRECTORY", help="of checkpoints, or a run's; made if missing")
    push = action("push", "upload checkpoints to a mirror")
    push.add_argument("where", type=Path, metavar="PATH", help=_PATH)
    push.add_argument("to", metavar="MIRROR", help="a URL such as s3://bucket/run, or a directory")
    for command in (pull, push):
        command.add_argument("--all", action="store_true", help="all that are missing there; default: the newest")


def place(text: str) -> Path | str:
    """A path; a URL as it is."""
    return text if is_url(text) else Path(text)


def pull(options: argparse.Namespace) -> int:
    """Fetch the newest, all, or one by its name."""
    url, name = _split(options.where)
    remote = _remote(url)
    directory: Path = options.to
    if any(scan(directory / RUNS_FOLDER)) or (directory / "config.yaml").exists():
        directory = directory / RUNS_FOLDER
    there = _readable(remote)
    names = [name] if name else [checkpoint.path.name for checkpoint in (there if options.all else there[-1:])]
    if not names:
        raise CheckpointError(f"{remote.url} holds no checkpoint.")
    if name and name not in (known := [checkpoint.path.name for checkpoint in there]):
        raise CheckpointError(f"{remote.url} holds no {name}{did_you_mean(name, known)}")
    here = {checkpoint.path.name: checkpoint.manifest.files for checkpoint in scan(directory)[0]}
    files = {checkpoint.path.name: checkpoint.manifest.files for checkpoint in there}
    damaged = False
    for wanted in names:
        if here.get(wanted) == files[wanted] and not Verification().problems(directory / wanted):
            print(f"{wanted}  is in {directory}")
            continue
        try:
            print(f"{wanted}  fetched, {in_units(_answered(remote, partial(_fetched, remote, directory, wanted)))}")
        except Torn as problem:
            print(f"{wanted}  damaged: {problem}")
            damaged = True
    if count := _answered(remote, lambda _: take(measured_lines(remote), directory)):
        print(f"{MEASURED}  values of {count} checkpoints, measured beside the run")
    return int(damaged)


def _fetched(remote: Remote, directory: Path, name: str, moved: Throttle) -> int:
    fetch(remote, directory, name, moved)
    return moved.moved


def push(options: argparse.Namespace) -> int:
    """Upload the newest valid one, the one that was named, or all."""
    remote, (place, _) = _remote(options.to), split_name(options.where)
    folder = place.parent if is_single(place) else find_directory(place)
    with uploads(folder, alone=True, wait_s=_WAITS_S) as is_alone:
        if not is_alone:
            raise CheckpointError(
                f"Another process, its run or a push, uploads from {folder}: push again when it has ended."
            )
        if options.all:
            return _pushed(remote, [checkpoint.path for checkpoint in scan(find_directory(options.where))[0]])
        return _pushed(remote, [find_source(options.where)])


def _pushed(remote: Remote, paths: Sequence[Path]) -> int:
    contents = _answered(remote, lambda _: Contents(remote, None))
    damaged = False
    for path in paths:
        with in_use(path) as is_there:  # its run may prune
            if not is_there:
                print(f"{path.name}  is not uploaded: it was deleted meanwhile")
                continue
            if problems := Verification().problems(path):
                print(f"{path.name}  is not uploaded, damaged: {'; '.join(problems)}")
                damaged = True
                continue
            held = hold(path)
        try:
            for name, manifest in held.manifests.items():
                there = contents.complete.get(name)
                if there is not None and there.run_id != manifest.run_id:
                    raise CheckpointError(f"{remote.url} holds {name} of another run: push to another URL.")
            sent = _answered(remote, partial(_uploaded, contents, held))
        except Torn as problem:
            print(f"{path.name}  is not uploaded: {problem}")
            damaged = True
            continue
        finally:
            held.release()
        print(f"{path.name}  {f'uploaded, {in_units(sent)}' if sent else f'is in {remote.url}'}")
    return int(damaged)


def _uploaded(contents: Contents, held: Held, moved: Throttle) -> int:
    try:
        contents.upload(held, moved)
    except Lost as problem:
        raise Torn(f"{problem}; push it again") from None
    return moved.moved


def listed(url: str) -> tuple[list[CheckpointInfo], list[tuple[Path, str]]]:
    """What a mirror holds, as ``layout.scan`` tells it of a folder."""
    remote = _remote(url)
    readable, unreadable = _answered(remote, lambda _: remote.checkpoints())
    if not readable and not unreadable:
        raise CheckpointError(f"{remote.url} holds no checkpoint.")
    return readable, [(Path(name), reason) for name, reason in unreadable]


def verified(text: str) -> dict[Path, list[str]]:
    """What is wrong with all checkpoints of a mirror, or with one by its name; all is read."""
    url, name = _split(text)
    remote = _remote(url)
    readable, unreadable = listed(url)
    if name:
        readable = [checkpoint for checkpoint in readable if checkpoint.path.name == name]
        unreadable = [pair for pair in unreadable if pair[0].name == name]
        if not readable and not unreadable:
            raise CheckpointError(f"{remote.url} holds no {name}.")

    found = {path: [reason] for path, reason in unreadable}
    for checkpoint in readable:
        found[checkpoint.path] = _answered(remote, partial(_problems, remote, checkpoint))
    return found


def _problems(remote: Remote, checkpoint: CheckpointInfo, moved: Throttle) -> list[str]:
    name, manifest = checkpoint.path.name, checkpoint.manifest
    records = {f"{name}/{file}": record for file, record in manifest.files.items()}
    problems = [remote.problem(file, record, moved) for file, record in records.items()]
    return [problem for problem in problems if problem]


def _remote(url: str) -> Remote:
    try:
        return Remote(url)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _split(text: str) -> tuple[str, str]:
    """A mirror, and the name of a checkpoint behind it, or nothing."""
    before, _, name = text.rstrip("/").rpartition("/")
    return (before, name) if before and named_iteration(Path(name)) is not None else (text, "")


def _readable(remote: Remote) -> list[CheckpointInfo]:
    readable, unreadable = _answered(remote, lambda _: remote.checkpoints())
    for name, reason in unreadable:
        print(f"{name}  cannot be read: {reason}", file=sys.stderr)
    return readable


def _answered(remote: Remote, question: Callable[[Throttle], T]) -> T:
    try:
        return patiently(question)
    except Unreachable as reason:
        raise CheckpointError(f"{remote.url} cannot be used: {str(reason).rstrip('.')}.") from None
