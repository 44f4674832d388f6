"""The commands ``checkpoints pull`` and ``push``, from and to a mirror."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ignite_engine.checkpoint.layout import named_iteration, scan
from ignite_engine.checkpoint.sources import RUNS_FOLDER, find_source
from ignite_engine.checkpoint.verification import problems_of
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


def _pull(options: argparse.Namespace) -> None:
    """Fetch the newest checkpoint, or the one that was named."""
    url, _, name = options.where.rstrip("/").rpartition("/")
    if not url or named_iteration(Path(name)) is None:
        url, name = options.where, ""
    directory: Path = options.to
    if any(scan(directory / RUNS_FOLDER)) or (directory / "config.yaml").exists():
        directory = directory / RUNS_FOLDER
    with _mirror(url) as remote:
        there = {checkpoint.path.name: checkpoint for checkpoint in remote.checkpoints()[0]}
        name = name or next(reversed(there), "checkpoint")
        if name not in there:
            raise CheckpointError(f"{remote.url} holds no {name}{did_you_mean(name, there)}")
        print(f"{name}  is in {fetch(remote, directory, there[name])}")


def _push(options: argparse.Namespace) -> None:
    """Upload the newest valid checkpoint, or the one that was named."""
    path = find_source(options.where)
    if problems := problems_of(path):
        raise CheckpointError(f"{path.name} is not uploaded, damaged: {'; '.join(problems)}.")
    with _mirror(options.to) as remote:
        upload(remote, path)
        print(f"{path.name}  uploaded to {remote.url}")


@contextmanager
def _mirror(url: str) -> Iterator[Remote]:
    """The mirror at ``url``; errors in the body become one line."""
    try:
        yield Remote(url)
    except Torn as problem:
        raise CheckpointError(f"{url} was not used: {problem}.") from None
    except CheckpointError:
        raise
    except Exception as error:  # a store may raise anything
        raise CheckpointError(f"{why(error)}: the mirror cannot be used.") from None
