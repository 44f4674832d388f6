"""A text corpus that every machine has, the source of Python's standard library, as bytes, and n-gram models of it.

A file is in the validation split if the SHA-256 of its path, relative to the library, is 0 modulo 10. Both splits are
read once into a cache folder and memory-mapped from there; files are written aside and renamed into place, so that
several processes may do so at once.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

SMOOTHING = 0.1  # added to each count of a byte
ORDERS = (0, 1, 2)

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]


def is_for_validation(relative_path: str) -> bool:
    """Whether the file at this POSIX path, relative to the library, is in the validation split."""
    return int(hashlib.sha256(relative_path.encode()).hexdigest(), 16) % 10 == 0


def source_files(library: Path) -> dict[str, Path]:
    """All ``*.py`` of the library by sorted relative POSIX path, without third-party packages."""
    files = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py") if path.is_file()}
    third_party = {"site-packages", "dist-packages"}
    return {name: files[name] for name in sorted(files) if third_party.isdisjoint(name.split("/"))}


@dataclass(frozen=True)
class Corpus:
    """The two splits on disk."""

    train: Path
    val: Path
    counts: Path  # n-gram counts of ``train``, created when first used


def open_corpus(cache_dir: str | os.PathLike[str] | None = None, library: Path | None = None) -> Corpus:
    """The corpus, read from the library unless it is cached.

    Args:
        cache_dir: default ``$XDG_CACHE_HOME/ignite_engine``, or ``~/.cache/ignite_engine``.
        library: default the running Python's.

    Raises:
        ValueError: a split would be empty.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ignite_engine"
    folder = Path(cache_dir).expanduser() if cache_dir is not None else default
    files = source_files(library)
    listing = [sys.version, *(f"{name} {path.stat().st_size}" for name, path in files.items())]
    digest = hashlib.sha256("\n".join(listing).encode()).hexdigest()[:16]
    corpus = Corpus(*(folder / f"stdlib-{digest}-{end}" for end in ("train.bin", "val.bin", "counts.npz")))
    for path, held_out in ((corpus.train, False), (corpus.val, True)):
        if path.exists():
            continue
        content = b"".join(file.read_bytes() for name, file in files.items() if is_for_validation(name) == held_out)
        if not content:
            raise ValueError(
                f"{library} has no source for {path.name}: expected Python's standard library as *.py files."
            )
        write_atomically(path, lambda file, content=content: file.write(content))  # type: ignore[misc]
    return corpus


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a temporary file and rename it: readers see a complete file or none, and the last writer wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def open_bytes(path: Path) -> Bytes:
    """The split at ``path`` as a read-only memory map."""
    return np.memmap(path, dtype=np.uint8, mode="r")


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of ``context`` bytes and the same shifted by one, both int64 of shape ``(context,)``.

    Args:
        path: of a split; memory-mapped in each process that reads it.
        starts: the first byte of each window.
        jitter: each access shifts the window by 0 .. ``jitter - 1`` bytes, drawn from torch's generator.
    """

    def __init__(self, path: Path, starts: Integers, context: int, *, jitter: int = 1) -> None:
        self.path, self.starts, self.context, self.jitter = path, starts, context, jitter
        self._bytes: Bytes | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._bytes is None:
            self._bytes = open_bytes(self.path)
        start = int(self.starts[index])
        if self.jitter > 1:
            start += int(torch.randint(self.jitter, ()))
        window = torch.from_numpy(self._bytes[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None}  # pickling a memory map copies the split


def training_windows(path: Path, context: int) -> Windows:
    """Adjacent windows over the whole split, each shifted at random by up to its own length.

    Raises:
        ValueError: the split is shorter than two windows.
    """
    count = path.stat().st_size // context - 1
    if count < 1:
        raise ValueError(
            f"context is {context} bytes, but {path} has {path.stat().st_size}: expected at least two windows."
        )
    return Windows(path, np.arange(count) * context, context, jitter=context)


def validation_windows(path: Path, context: int, limit: int) -> Windows:
    """At most ``limit`` windows that do not overlap, spread evenly over the split, always the same.

    Raises:
        ValueError: ``limit`` is below 1, or the split is shorter than a window.
    """
    usable = path.stat().st_size - 2  # the order-2 model needs two bytes before the first predicted one
    count = min(limit, usable // context)
    if count < 1:
        raise ValueError(f"Expected at least one validation window, got {limit} of {context} bytes on {usable} bytes.")
    return Windows(path, 1 + np.arange(count) * (usable // count), context)


def predicted_positions(windows: Windows) -> Integers:
    """Positions in the split of the bytes that the windows' targets hold."""
    return (windows.starts[:, None] + np.arange(1, windows.context + 1)).ravel()


class NgramModels:
    """Byte models of order 0, 1 and 2: p(byte | the n bytes before) = (count + 0.1) / (count of context + 25.6)."""

    def __init__(self, counts: Sequence[tuple[Integers, Integers]]) -> None:
        self.counts = counts  # for each order, the sorted (n+1)-grams that occur, and their counts

    @classmethod
    def of(cls, corpus: Corpus) -> NgramModels:
        """The models of the training split, cached; counting takes a few seconds the first time."""
        if not corpus.counts.exists():
            models = cls.counted(open_bytes(corpus.train))
            arrays = {f"{what}{n}": each for n, pair in zip(ORDERS, models.counts, strict=True)
                      for what, each in zip(("grams", "counts"), pair, strict=True)}  # fmt: skip
            write_atomically(corpus.counts, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
        with np.load(corpus.counts) as arrays:
            return cls([(arrays[f"grams{n}"], arrays[f"counts{n}"]) for n in ORDERS])

    @classmethod
    def counted(cls, text: Bytes) -> NgramModels:
        """The models of ``text``."""
        tables = (np.bincount(grams(text, n)) for n in ORDERS)
        return cls([(found := np.flatnonzero(table), table[found]) for table in tables])

    def bits_per_byte(self, text: Bytes, positions: Integers) -> list[float]:
        """The mean of -log2 p over the bytes of ``text`` at ``positions`` (each at least 2), for each order."""
        bits = []
        for n, (found, counts) in zip(ORDERS, self.counts, strict=True):
            table = np.zeros((256**n, 256))
            table.reshape(-1)[found] = counts
            asked = grams(text, n)[positions - n]
            contexts = table.sum(axis=1)[asked // 256] + 256 * SMOOTHING
            bits.append(float(-np.log2((table.reshape(-1)[asked] + SMOOTHING) / contexts).mean()))
        return bits


def grams(text: Bytes, order: int) -> Integers:
    """Each byte from index ``order`` on, with the ``order`` bytes before it, as one big-endian number."""
    number = np.zeros(len(text) - order, dtype=np.int64)
    for start in range(order + 1):
        number *= 256
        number += text[start : start + len(number)]
    return number
