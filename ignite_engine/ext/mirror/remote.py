"""The files of a mirror; each operation is one call of fsspec."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from blake3 import blake3

from ignite_engine.checkpoint import filesystem
from ignite_engine.checkpoint.filesystem import FileRecord, open_regular
from ignite_engine.checkpoint.layout import named_iteration
from ignite_engine.checkpoint.manifest import MANIFEST_NAME, parse_manifest
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.states.tiers import order
from ignite_engine.errors import CheckpointError, one_line

_PIECE_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 23
"""The size of one part of an upload; stores accept at most 10,000 parts per file."""
_SILENT_S = 300.0
"""A store that transfers no byte for so many seconds is given up."""
_SECRET = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)|\?[^\s'\"]+")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")


class Torn(CheckpointError):
    """A file is missing or does not match the manifest; the message is one line."""


class Remote:
    """The mirror at a URL.

    Args:
        url: a directory, or a URL of fsspec without credentials.

    Raises:
        ValueError: one line; the URL holds credentials, or the package for it is missing.

    Methods raise the store's errors unchanged; :func:`why` makes one line of them.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        _check_url(url)
        self.url = url.rstrip("/") or "/"
        self._is_local = "://" not in url or url.startswith(("file://", "local://"))
        options = {"auto_mkdir": True} if self._is_local else {}
        try:  # cached listings would hide changes by other processes
            self._store, self._root = url_to_fs(url, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{url} cannot be used: {str(error).rstrip('.')}.") from None
        self.moved_at = time.monotonic()
        """When the last byte was transferred, or the transfer began."""

    @property
    def is_silent(self) -> bool:
        """Whether no byte was transferred for a long time."""
        return time.monotonic() - self.moved_at > _SILENT_S

    def is_within(self, directory: Path) -> bool:
        """Whether the mirror is this directory or inside it."""
        return self._is_local and Path(self._root).resolve().is_relative_to(directory.resolve())

    def names(self) -> list[str]:
        """Names of the checkpoints in the mirror, also of incomplete ones."""
        return sorted(name for name in self._list("") if named_iteration(Path(name)) is not None)

    def checkpoints(self) -> tuple[list[CheckpointInfo], list[tuple[str, str]]]:
        """The checkpoints with a manifest, in the order they were saved; name and reason of those with a damaged one.

        The path of a checkpoint is its name.
        """
        readable: list[CheckpointInfo] = []
        unreadable: list[tuple[str, str]] = []
        for name in self.names():
            manifest = f"{name}/{MANIFEST_NAME}"
            try:
                text = bytes(self._store.cat_file(self._path(manifest)))
                readable.append(CheckpointInfo(Path(name), parse_manifest(manifest, text)))
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                unreadable.append((name, str(error)))
        return sorted(readable, key=order), unreadable

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; an existing one is replaced atomically."""
        if self._is_local:
            filesystem.replace_file(Path(self._path(name)), lambda file: file.write(content))
        else:
            self._store.pipe_file(self._path(name), content)

    def put(self, source: Path, name: str, record: FileRecord) -> None:
        """Upload a file.

        Raises:
            Torn: the local file does not match the manifest.
            OSError: the uploaded file has another size.
        """
        digest, block = blake3(), max(_BLOCK_BYTES, record.bytes // 5000)
        with open_regular(source) as file, self._store.open(self._path(name), "wb", block_size=block) as there:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                there.write(piece)
                self.moved_at = time.monotonic()
        if FileRecord.of(record.bytes, digest) != record:
            raise Torn(f"{source.name} is not what was saved")
        if (size := self._store.size(self._path(name))) != record.bytes:
            raise OSError(f"{name} has {size} bytes there, {record.bytes} were sent")

    def get(self, name: str, target: Path, record: FileRecord) -> None:
        """Download a file into a new one, fsynced.

        Raises:
            Torn: it is missing, or does not match the manifest.
        """

        def copy(file: Any) -> None:
            with self._store.open(self._path(name), "rb", block_size=_BLOCK_BYTES, cache_type="readahead") as there:
                while piece := there.read(_PIECE_BYTES):
                    file.write(piece)
                    self.moved_at = time.monotonic()

        try:
            found = filesystem.write_file(target, copy)
        except FileNotFoundError:
            raise Torn(f"{name} is missing") from None
        if problem := record.problem(name, found):
            raise Torn(problem)

    def delete(self, checkpoint: str) -> None:
        """Remove the files of a checkpoint, the manifest first, so that a kill leaves no damaged checkpoint."""
        for file in sorted(self._list(checkpoint), key=lambda name: name != MANIFEST_NAME):
            with contextlib.suppress(FileNotFoundError):
                self._store.rm_file(self._path(f"{checkpoint}/{file}"))
        if self._is_local:
            with contextlib.suppress(OSError):
                self._store.rmdir(self._path(checkpoint))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _list(self, name: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [path.rstrip("/").rpartition("/")[2] for path in self._store.ls(self._path(name), detail=False)]
        return []


def why(error: BaseException) -> str:
    """One line about a store's error, with ``***`` in the place of passwords and queries in URLs."""
    return _SECRET.sub("***", one_line(error)).rstrip(".")


def _check_url(url: str) -> None:
    """Refuse a malformed URL, and one with a password or a query; the message does not repeat these."""
    shown = _SECRET.sub("***", url)
    if not url.partition("://")[2 if "://" in url else 0].strip("/") and url != "/":
        raise ValueError(f"mirror must name a directory, a bucket or a folder, got {shown!r}: s3://bucket/run, say.")
    if found := _ONE_SLASH.match(url):
        raise ValueError(
            f"mirror is neither a URL nor a path, got {shown!r}: a URL begins with {found[1]}://, a directory of that "
            "name with ./"
        )
    for part in url.split("::") if "://" in url else ():
        split = urlsplit(part)
        if split.query or ":" in split.netloc.rpartition("@")[0]:
            raise ValueError(
                f"mirror must hold no credentials, got {shown}: a URL is written to logs and checkpoints. Leave user "
                "and password, or the query, out of it; the store's package reads its own environment variables and "
                "files."
            )
