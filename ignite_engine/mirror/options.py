"""Where a mirror is, what it keeps, and how much of the network it takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ignite_engine.errors import check_type, did_you_mean, is_number, is_whole

_SECRET = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)|\?[^\s'\"]+")

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_LOCAL = ("file://", "local://")


@dataclass(frozen=True, kw_only=True)
class MirrorOptions:
    """The settings of a mirror.

    Args:
        url: a directory, or a URL of ``fsspec``, such as ``s3://bucket/run``. It holds the checkpoints of one run. It
            never has credentials, nor what else the store needs: that comes from the environment and from the
            configuration of the store's package.
        keep_last: newest ones kept there; None: as many as the run keeps. Its best and every n-th are kept there, too.
        max_mib_per_s: of an upload, in MiB per second; None: as fast as it goes.
        parallel: files that are sent or fetched at once.

    Raises:
        TypeError: a value is of another type.
        ValueError: a value is out of range, or the URL holds a password or a query, which is not repeated.
    """

    url: str
    keep_last: int | None = None
    max_mib_per_s: float | None = None
    parallel: int = 4

    @classmethod
    def of(cls, given: str | PathLike[str] | Mapping[str, Any] | MirrorOptions) -> MirrorOptions:
        """A directory, a URL, or the fields by name."""
        if isinstance(given, MirrorOptions):
            return given
        if not isinstance(given, Mapping):
            is_path = isinstance(given, str | PathLike)
            check_type("mirror", given, is_path, "a directory, a URL, or a mapping of its settings")
            return cls(url=fspath(given))
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"mirror has no setting {str(name)!r}{did_you_mean(str(name), known)}")
        if "url" not in given:
            raise ValueError("mirror needs a url: a directory, or a URL such as s3://bucket/run.")
        return cls(**{**given, "url": fspath(given["url"]) if isinstance(given["url"], Path) else given["url"]})

    def __post_init__(self) -> None:
        check_type("mirror", self.url, isinstance(self.url, str), "a directory or a URL")
        if not self.url:
            raise ValueError("mirror must be a directory or a URL, got an empty text.")
        check_url(self.url)
        rate = self.max_mib_per_s
        for name, value, least in (("keep_last", self.keep_last, 1), ("parallel", self.parallel, 1)):
            is_right = is_whole(value) or (value is None and name == "keep_last")
            check_type(f"mirror: {name}", value, is_right, "a whole number")
            if value is not None and value < least:
                raise ValueError(f"mirror: {name} must be at least {least}, got {value}.")
        check_type("mirror: max_mib_per_s", rate, rate is None or is_number(rate), "a number or None")
        if rate is not None and not 0 < rate < float("inf"):
            raise ValueError(f"mirror: max_mib_per_s must be more than 0, got {rate}.")


def is_url(text: str) -> bool:
    """Whether it is a URL, and not the path of a directory."""
    return "://" in text


def check_url(url: str) -> None:
    """Refuse what is no place, and a URL with a password or a query, without repeating them.

    Raises:
        ValueError: one line.
    """
    if found := _ONE_SLASH.match(url):
        raise ValueError(
            f"mirror is neither a URL nor a path, got {without_secrets(url)!r}: a URL begins with {found[1]}://, a "
            "directory of that name with ./"
        )
    for part in url.split("::") if is_url(url) else ():
        split = urlsplit(part)
        if split.query or ":" in split.netloc.rpartition("@")[0]:
            raise ValueError(
                f"mirror must hold no credentials, got {without_secrets(url)}: a URL is written to logs and "
                "checkpoints. Leave user and password, or the query, out of it; the store's package reads its own "
                "environment variables and files."
            )
    if is_url(url) and not url.partition("://")[2].strip("/"):
        raise ValueError(f"mirror must name a bucket or a folder, got {url!r}: give a URL such as s3://bucket/run.")


def check_protocol(url: str) -> None:
    """Refuse a URL for which a package is missing.

    Raises:
        ValueError: one line, which names the package.
    """
    if not is_url(url) or url.startswith(_LOCAL):
        return
    try:
        from fsspec.core import get_filesystem_class, split_protocol
    except ImportError:
        raise ValueError(f"{url} needs the package fsspec: pip install 'ignite-engine[mirror]'.") from None
    try:
        get_filesystem_class(split_protocol(url.split("::")[0])[0])
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url} cannot be used: {str(error).rstrip('.')}.") from None


def without_secrets(text: str) -> str:
    """A text with ``***`` in the place of passwords and queries of URLs."""
    return _SECRET.sub("***", text)
