"""Checkpoints that are to be uploaded, kept by hard links while retention may delete them under their own names."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from ignite_engine.checkpointing.in_use import in_use, unused
from ignite_engine.checkpointing.layout import manifest_of
from ignite_engine.checkpointing.manifest import MANIFEST_NAME, Manifest

FOLDER = ".mirror"
"""In a folder of checkpoints: what is being uploaded or fetched."""
_HELD = "held"


@dataclass(frozen=True)
class Held:
    """A checkpoint."""

    checkpoint: Path
    manifests: dict[str, Manifest]
    links: Path | None
    """A folder with a link to each file; None: the file system has no hard links, and nothing is held."""
    uploaded: set[str] = field(default_factory=set)
    """Files that need not be sent again."""
    in_use: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Holds the lock of the links, which keeps :func:`sweep` from removing them."""

    @property
    def name(self) -> str:
        return self.checkpoint.name

    def file(self, checkpoint: str, name: str) -> Path:
        """Where a file of it is read."""
        return (self.checkpoint.parent if self.links is None else self.links) / checkpoint / name

    def manifest(self, checkpoint: str) -> Path:
        """The newest manifest of the checkpoint: values may have been added to it since."""
        beside = self.checkpoint.parent / checkpoint / MANIFEST_NAME
        return beside if beside.exists() else self.file(checkpoint, MANIFEST_NAME)

    def release(self) -> None:
        """Let go of it."""
        if self.links is not None:
            shutil.rmtree(self.links, ignore_errors=True)
            self.in_use.close()
            for empty in (self.links.parent, self.links.parent.parent):
                with contextlib.suppress(OSError):  # it holds another one
                    empty.rmdir()


def hold(checkpoint: Path) -> Held:
    """Link the files of a committed checkpoint.

    Raises:
        CheckpointError: a manifest cannot be read.
    """
    manifest = manifest_of(checkpoint)
    manifests = {checkpoint.name: manifest}
    links, lock = checkpoint.parent / FOLDER / _HELD / secrets.token_hex(4), contextlib.ExitStack()
    try:
        links.mkdir(parents=True)
        lock.enter_context(in_use(links))
        for name, needed in manifests.items():
            (links / name).mkdir()
            for file in (*needed.files, MANIFEST_NAME):
                os.link(checkpoint.parent / name / file, links / name / file, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.rmtree(links, ignore_errors=True)
        lock.close()
        return Held(checkpoint, manifests, None)
    return Held(checkpoint, manifests, links, in_use=lock)


def sweep(directory: Path) -> None:
    """Remove the links of processes that were killed."""
    folder = directory / FOLDER
    with contextlib.suppress(OSError), unused((folder / _HELD).iterdir()) as left:
        for links in left:
            shutil.rmtree(links, ignore_errors=True)
    for empty in (folder / _HELD, folder):
        with contextlib.suppress(OSError):
            empty.rmdir()
