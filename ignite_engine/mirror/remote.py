"""The files of a mirror, each operation one call of fsspec, or of the file system where it is a directory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing import filesystem
from ignite_engine.checkpointing.filesystem import FileRecord, hash_file, new_hash, open_regular
from ignite_engine.checkpointing.layout import named_iteration
from ignite_engine.checkpointing.manifest import MANIFEST_NAME, parse_manifest
from ignite_engine.checkpointing.part_file import compare
from ignite_engine.checkpointing.retention import CheckpointInfo
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.mirror.options import check_protocol, check_url, is_url, without_secrets
from ignite_engine.mirror.threads import in_threads

PIECE_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 23
"""Bytes of one part of an upload; a store takes at most 10,000 parts of a file."""
_MD5 = re.compile(r"[0-9a-f]{32}")
Moved = Callable[[int], None]
"""Called with the number of bytes that were just sent or received; it may wait, or raise."""


class Torn(Exception):
    """A file of a mirror is not what its checkpoint's manifest says, or not there; the message is one line."""


class Lost(OSError):
    """A file that was uploaded is not there any more; the message is one line."""


class Remote:
    """A mirror by its URL.

    Args:
        url: a directory, or a URL of fsspec without credentials.

    Raises:
        ValueError: one line; the URL holds credentials, or nothing is known of its protocol.

    What a store raises leaves every method as it is; :func:`why` makes one line of it.
    """

    def __init__(self, url: str) -> None:
        check_url(url)
        check_protocol(url)
        self.url = url.rstrip("/") if len(url) > 1 else url
        self._directory: Path | None = None
        path = url.removeprefix("file://").removeprefix("local://")
        if not is_url(path):
            self._directory = Path(path).absolute()
            return
        from fsspec.core import url_to_fs

        try:
            # answers that are kept would hide what another process has changed there
            self._store, self._root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{url} cannot be used: {without_secrets(str(error)).rstrip('.')}.") from None

    def is_within(self, directory: Path) -> bool:
        """Whether it is a directory, this one or one in it."""
        return self._directory is not None and self._directory.resolve().is_relative_to(directory.resolve())

    def names(self) -> list[str]:
        """Names of the checkpoints of which anything is there, whole or not."""
        found = self._list("")
        return sorted(name for name in found if named_iteration(Path(name)) is not None)

    def checkpoints(self) -> tuple[list[CheckpointInfo], list[tuple[str, str]]]:
        """Those with a manifest, in the order they were saved; and name and reason of those whose manifest is damaged.

        The path of a checkpoint is its name.
        """
        readable: list[CheckpointInfo] = []
        unreadable: list[tuple[str, str]] = []
        names = self.names()
        for name, text in zip(names, in_threads(self._manifest_text, names), strict=True):
            if text is None:
                continue
            try:
                readable.append(CheckpointInfo(Path(name), parse_manifest(f"{name}/{MANIFEST_NAME}", text)))
            except CheckpointError as error:
                unreadable.append((name, str(error)))
        return sorted(readable, key=order), unreadable

    def _manifest_text(self, name: str) -> bytes | None:
        try:
            return self.read(f"{name}/{MANIFEST_NAME}")
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        """A small file, whole."""
        if self._directory is not None:
            return (self._directory / name).read_bytes()
        return bytes(self._store.cat_file(self._path(name)))

    def write(self, name: str, content: bytes) -> None:
        """A small file, which replaces one of that name at once."""
        if self._directory is not None:
            path = self._directory / name
            filesystem.ensure_directory(path.parent)
            filesystem.replace_file(path, lambda file: file.write(content))
        else:
            self._store.pipe_file(self._path(name), content)
        if self._size(name) != len(content):
            raise OSError(f"{name} has {self._size(name)} bytes there, {len(content)} were sent")

    def put(self, source: Path, name: str, record: FileRecord, moved: Moved) -> None:
        """Upload a file and verify its size, and its hash where the store tells it.

        Raises:
            Torn: the file here is not what the manifest says.
        """
        digest, told = new_hash(record.algorithm), hashlib.md5(usedforsecurity=False)
        tells = self._directory is None and self._tells_md5(record.bytes)
        with open_regular(source) as file, self._writer(name, record.bytes) as write:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                if tells:
                    told.update(piece)
                write(piece)
                moved(len(piece))
            if f"{record.algorithm}:{digest.hexdigest()}" != record.hash:
                raise Torn(f"{source.name} is not what was saved")
        self._check(name, record, told.hexdigest() if tells else None)

    def get(self, name: str, target: Path, record: FileRecord, moved: Moved) -> None:
        """Download a file into a new one, fsynced.

        Raises:
            Torn: it is not there, or not what the manifest says; nothing is left of it here.
        """

        def copy(file: Any) -> None:
            for piece in self._pieces(name):
                file.write(piece)
                moved(len(piece))

        try:
            found = filesystem.write_file(target, copy)
            if found.algorithm != record.algorithm:
                with open_regular(target) as file:
                    found = hash_file(file, record.algorithm)
            if problem := compare(name, found, record):
                raise Torn(problem)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(target)
            if isinstance(error, FileNotFoundError) and error.filename != str(target):
                raise Torn(f"{name} is missing") from None
            raise

    def problem(self, name: str, record: FileRecord, moved: Moved) -> str | None:
        """Read a whole file; what is wrong with it, or None."""
        digest, size = new_hash(record.algorithm), 0
        try:
            for piece in self._pieces(name):
                digest.update(piece)
                size += len(piece)
                moved(len(piece))
        except FileNotFoundError:
            return f"{name} is missing"
        return compare(name, FileRecord(size, f"{record.algorithm}:{digest.hexdigest()}"), record)

    def lost(self, checkpoint: str, files: Mapping[str, FileRecord]) -> list[str]:
        """Those files of a checkpoint that are not there with their size, by one request."""
        sizes = self._sizes(checkpoint)
        return [name for name, record in files.items() if sizes.get(name) != record.bytes]

    def delete(self, checkpoint: str) -> None:
        """Remove what is there of a checkpoint, its manifest first: a kill in between leaves no checkpoint."""
        files = sorted(self._list(checkpoint), key=lambda name: name != MANIFEST_NAME)
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                self._remove(f"{checkpoint}/{file}")
        if self._directory is not None:
            with contextlib.suppress(OSError):  # something of somebody else is in it
                os.rmdir(self._directory / checkpoint)

    def delete_file(self, name: str) -> None:
        """Remove a file that need not be there."""
        with contextlib.suppress(FileNotFoundError):
            self._remove(name)

    def _remove(self, name: str) -> None:
        if self._directory is not None:
            os.unlink(self._directory / name)
        else:
            self._store.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _list(self, name: str) -> list[str]:
        if self._directory is not None:
            try:
                return os.listdir(self._directory / name)
            except FileNotFoundError:
                return []
        self._store.invalidate_cache()
        try:
            found = self._store.ls(self._path(name), detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def _sizes(self, name: str) -> dict[str, int]:
        if self._directory is not None:
            sizes = dict[str, int]()
            for file in self._list(name):
                with contextlib.suppress(FileNotFoundError):
                    sizes[file] = self._size(f"{name}/{file}")
            return sizes
        self._store.invalidate_cache()
        try:
            found = self._store.ls(self._path(name), detail=True)
        except FileNotFoundError:
            return {}
        return {info["name"].rstrip("/").rpartition("/")[2]: int(info["size"] or 0) for info in found}

    def _size(self, name: str) -> int:
        if self._directory is not None:
            return os.stat(self._directory / name).st_size
        self._store.invalidate_cache()
        return int(self._store.info(self._path(name))["size"])

    def _pieces(self, name: str) -> Iterator[bytes]:
        if self._directory is not None:
            with open_regular(self._directory / name) as file:
                while piece := file.read(PIECE_BYTES):
                    yield piece
            return
        self._store.invalidate_cache()
        size = int(self._store.info(self._path(name))["size"])
        with self._store.open(
            self._path(name), "rb", block_size=_BLOCK_BYTES, cache_type="readahead", size=size
        ) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    @contextlib.contextmanager
    def _writer(self, name: str, size: int) -> Iterator[Callable[[bytes], object]]:
        """A file that is there under its name only if the block ends without an error, where the store allows it."""
        if self._directory is not None:
            path = self._directory / name
            filesystem.ensure_directory(path.parent)
            temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
            try:
                with open(temporary, "xb") as local:
                    yield local.write
                    local.flush()
                    os.fsync(local.fileno())
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            return
        block = max(_BLOCK_BYTES, -(-size // 5000))
        file = self._store.open(self._path(name), "wb", block_size=block)
        try:
            yield file.write
        except BaseException:
            with contextlib.suppress(Exception):  # the error that ended the upload is the one to report
                file.discard()
            file.closed = True  # or it would be completed as it is when it is collected
            raise
        file.close()

    def _tells_md5(self, size: int) -> bool:
        """Whether a store tells the MD5 of a file: GCS does, S3 of one that is not sent in parts."""
        protocols = self._store.protocol if isinstance(self._store.protocol, tuple) else (self._store.protocol,)
        return "gs" in protocols or ("s3" in protocols and size < _BLOCK_BYTES)

    def _check(self, name: str, record: FileRecord, md5: str | None) -> None:
        if (size := self._size(name)) != record.bytes:
            raise OSError(f"{name} has {size} bytes there, {record.bytes} were sent")
        if md5 is None:
            return
        info = self._store.info(self._path(name))
        told = str(info.get("ETag", "")).strip('"')
        if "md5Hash" in info:
            told = base64.b64decode(info["md5Hash"]).hex()
        # with some encryptions it is no MD5: then what is there is read
        if _MD5.fullmatch(told) and told != md5 and (problem := self.problem(name, record, lambda count: None)):
            raise OSError(f"{problem} after the upload")


def order(checkpoint: CheckpointInfo) -> tuple[int, int, str]:
    """A sort key: the order in which the checkpoints of one run were saved."""
    return checkpoint.manifest.sequence, checkpoint.iteration, checkpoint.path.name


def why(error: BaseException) -> str:
    """One line about what a store raised, without credentials."""
    return without_secrets(one_line(error)).rstrip(".")
