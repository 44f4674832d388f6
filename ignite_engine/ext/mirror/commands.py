"""``checkpoints pull`` and ``push``: from and to a mirror, a URL or a directory elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from ignite_engine.checkpoint.layout import named_iteration, scan
from ignite_engine.checkpoint.manifest import read_manifest
from ignite_engine.checkpoint.sources import RUNS_FOLDER, find_source
from ignite_engine.checkpoint.states.tiers import Unreachable
from ignite_engine.checkpoint.verification import Verification
from ignite_engine.cli.parsing import Parser
from ignite_engine.errors import CheckpointError, did_you_mean
from ignite_engine.ext.mirror.fetch import fetch
from ignite_engine.ext.mirror.remote import Remote, Torn, why
from ignite_engine.ext.mirror.upload import upload

_PATH = "a checkpoint, a run's folder, or one of checkpoints (its last valid one), or RUN/best"
_FROM = "a mirror: a URL such as s3://bucket/run, or a directory; its newest checkpoint, or one by its name behind it"


def pull(action: Parser) -> None:
    action.add_argument("where", metavar="MIRROR", help=_FROM)
    action.add_argument("to", type=Path, metavar="DIRECTORY", help="of checkpoints, or a run's; made if missing")
    action.set_defaults(work=_pull)


def push(action: Parser) -> None:
    action.add_argument("where", type=Path, metavar="PATH", help=_PATH)
    action.add_argument("to", metavar="MIRROR", help="a URL such as s3://bucket/run, or a directory")
    action.set_defaults(work=_push)


def _pull(options: argparse.Namespace) -> int:
    """Fetch the newest, or one by its name."""
    before, _, last = options.where.rstrip("/").rpartition("/")
    is_one = bool(before) and named_iteration(Path(last)) is not None
    remote = _remote(before if is_one else options.where)
    directory: Path = options.to
    if any(scan(directory / RUNS_FOLDER)) or (directory / "config.yaml").exists():
        directory = directory / RUNS_FOLDER
    try:
        there = {checkpoint.path.name: checkpoint for checkpoint in remote.checkpoints()[0]}
        if not there:
            raise CheckpointError(f"{remote.url} holds no checkpoint.")
        name = last if is_one else next(reversed(there))
        if name not in there:
            raise CheckpointError(f"{remote.url} holds no {name}{did_you_mean(name, there)}")
        here = directory / name
        is_here = here.exists() and read_manifest(here).files == there[name].manifest.files
        if is_here and not Verification().problems(here):
            print(f"{name}  is in {directory}")
        else:
            print(f"{name}  fetched to {fetch(remote, directory, there[name])}")
    except (Torn, Unreachable) as problem:
        raise CheckpointError(f"{options.where} was not fetched: {problem}.") from None
    except CheckpointError:
        raise
    except Exception as error:  # a store may raise anything
        raise CheckpointError(f"{remote.url} cannot be used: {why(error)}.") from None
    return 0


def _push(options: argparse.Namespace) -> int:
    """Upload the newest valid one, or the one that was named."""
    remote, path = _remote(options.to), find_source(options.where)
    if problems := Verification().problems(path):
        raise CheckpointError(f"{path.name} is not uploaded, damaged: {'; '.join(problems)}.")
    try:
        upload(remote, path)
    except (Torn, CheckpointError) as problem:
        raise CheckpointError(f"{path.name} is not uploaded: {str(problem).rstrip('.')}.") from None
    except Exception as error:  # a store may raise anything
        raise CheckpointError(f"{remote.url} cannot be used: {why(error)}.") from None
    print(f"{path.name}  uploaded to {remote.url}")
    return 0


def _remote(url: str) -> Remote:
    try:
        return Remote(url)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
