"""A source to load from: where it is, which of its checkpoints, what is taken from it, and whether it must be there."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Literal

from ignite_engine.checkpointing import layout as names
from ignite_engine.checkpointing.filesystem import Signature, hash_file, open_regular, signature
from ignite_engine.checkpointing.load.plan import LoadPlan
from ignite_engine.checkpointing.manifest import MANIFEST_NAME, Manifest, read_manifest
from ignite_engine.checkpointing.naming import (
    Which,
    check_which,
    find_directory,
    find_source,
    is_there,
    scored_by,
    split_name,
)
from ignite_engine.checkpointing.retention import CheckpointInfo, of_one_run, ranked
from ignite_engine.checkpointing.store import CheckpointStore
from ignite_engine.checkpointing.weights_source import Source, read_source
from ignite_engine.errors import CheckpointError, check_type, one_line

logger = logging.getLogger(__name__)

_OF_A_RUN = {"counters", "trainer", "data", "rng"}


@dataclass(frozen=True)
class Found:
    """A checkpoint or a file of weights that a source meant, and enough to know another one from it later."""

    path: Path
    digest: str
    """A hash of what is in it; labels and metrics do not count."""
    iteration: int | None = None
    """The iteration of the run that saved it; a file of weights has None here and in the fields below."""
    sequence: int | None = None
    created_at: str | None = None
    score: float | None = None
    """Where the best was asked for."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Which checkpoint it is: two that were saved with the same bytes differ."""
        return self.digest, self.sequence, self.created_at

    @classmethod
    def of(cls, path: Path, metric: str | None = None) -> Found:
        """What is there now.

        Raises:
            CheckpointError: one line; it cannot be read.
        """
        return cls(path, _hash(path)) if path.is_file() else cls.of_checkpoint(path, read_manifest(path), metric)

    @classmethod
    def of_checkpoint(cls, path: Path, manifest: Manifest, metric: str | None = None) -> Found:
        """A checkpoint by its manifest."""
        score = None if metric is None else manifest.metrics.get(metric)
        return cls(path, _digest(manifest), manifest.iteration, manifest.sequence, manifest.created_at, score)

    def read(self, rank: int, *, mmap: bool = False) -> Source:
        """Read exactly this; see :func:`read_source`.

        Raises:
            CheckpointError: one line; it cannot be read, or something else is there by now.
        """
        before = signature(self.path.resolve())
        source = read_source(self.path, rank, mmap=mmap, whole=False)
        digest = _hash(self.path) if source.manifest is None else _digest(source.manifest)
        if digest != self.digest or signature(self.path.resolve()) != before:
            raise CheckpointError(f"{self.path} was replaced while it was read.")
        return source


@dataclass(frozen=True)
class LoadSource:
    """One of a list of sources; if several contain a name, the last one wins.

    Args:
        path: a checkpoint, a folder of checkpoints or of a run, or a file of weights (safetensors, or a state_dict of
            ``torch.save``). A folder may be followed by a name: ``runs/x/best``.
        plan: what is taken from it, and under which names: by default the model.
        which: of a folder the ``last`` (or ``newest``) valid checkpoint or the ``best`` one.
        metric, mode: by which it is the best, and whether ``min`` or ``max`` is good; None: as the run that saved them
            says.
        optional: it may be missing; one that is there must be valid.
        dynamic: a :class:`~ignite_engine.handlers.ModelBank` loads it again while training, when there is a newer one.

    Raises:
        TypeError, ValueError: a value is of another type, or is not one of those above; a dynamic source has a plan
            with more than weights and optimizers.
    """

    path: str | Path
    plan: LoadPlan = field(default_factory=LoadPlan.fine_tune)
    which: Which = "last"
    metric: str | None = None
    mode: Literal["min", "max"] | None = None
    optional: bool = False
    dynamic: bool = False

    def __post_init__(self) -> None:
        check_type("path", self.path, bool(self.path) and isinstance(self.path, str | PathLike), "a path")
        check_type("plan", self.plan, isinstance(self.plan, LoadPlan), "a LoadPlan")
        for name in ("optional", "dynamic"):
            check_type(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        check_which(self.which)
        if self.mode not in (None, "min", "max"):
            raise ValueError(f"mode must be 'min', 'max' or None, got {self.mode!r}.")
        if (self.metric is None) != (self.mode is None) or (self.metric is not None and self.named[1] != "best"):
            raise ValueError(
                f"metric and mode say together which checkpoint is the best, got metric={self.metric!r}, "
                f"mode={self.mode!r} and which={self.which!r}."
            )
        if self.dynamic and (self.plan.parts is None or _OF_A_RUN & set(self.plan.parts)):
            raise ValueError(
                f"A dynamic source is loaded while training: its plan has model, optimizer or averages as parts, got "
                f"{'all parts' if self.plan.parts is None else list(self.plan.parts)}."
            )

    @property
    def named(self) -> tuple[Path, Which]:
        """The path without a name at its end, and which checkpoint is meant of a folder."""
        return split_name(self.path, self.which)

    def find(self) -> Found | None:
        """What is meant now, verified; None: it is optional and there is none.

        Raises:
            CheckpointError: one line; there is none, or none that is valid.
        """
        place, which = self.named
        if self.optional and not is_there(place):
            return None
        if which != "best":
            return Found.of(find_source(place))
        store = CheckpointStore(find_directory(place))
        metric, mode = self.scored_by(store)
        best = store.best(metric, mode)
        if best is None and not self.optional:
            raise CheckpointError(f"{place} holds no valid checkpoint with {metric}.")
        return Found.of(best.path, metric) if best else None

    def scored_by(self, store: CheckpointStore) -> tuple[str, str]:
        """Metric and mode by which the best is chosen.

        Raises:
            CheckpointError: neither this nor any checkpoint says it.
        """
        return scored_by(store, self.metric, self.mode)


class SourceWatch:
    """Looks whether a source has something newer, on one rank; what is refused is named once, in a warning."""

    def __init__(self, source: LoadSource) -> None:
        self.source = source
        self._known: dict[Path, tuple[tuple[Signature | None, ...], str]] = {}
        self._named: set[str] = set()
        self._unfit: set[str] = set()

    def newer(self, than: Found | None) -> Found | None:
        """The newest, or the best, that is valid and came after ``than``; None: there is none.

        Of a folder that is one that was saved later, or has a better score, perhaps with the same bytes: the run has
        trained its copy since. A checkpoint or a file that is given by its own path must have changed. Where it is the
        very one that was refused as :meth:`unfit`, it is no other.
        """
        path, which = self.source.named
        try:
            if path.is_file():
                found = Found(path, self._unless_known(path, [path.resolve()], lambda: _hash(path)))
                return found if self._is_other(found, than) else None
            if (path / MANIFEST_NAME).exists() or names.named_iteration(path) is not None:
                if not is_there(path):
                    return None
                info, store = CheckpointInfo(path, read_manifest(path)), CheckpointStore(path.parent)
                return self._valid(store, [info], lambda found: self._is_other(found, than))
            if not is_there(path):
                return None
            return self._in_folder(CheckpointStore(find_directory(path)), which, than)
        except (CheckpointError, OSError) as error:
            self.refuse(path, one_line(error))
            return None

    def refuse(self, path: Path, reason: str) -> None:
        """Name, once, what is not loaded and why; not what is gone by now, as the run that saved it pruned it."""
        if reason not in self._named and path.exists():
            self._named.add(reason)
            logger.warning("A newer source is refused, and training goes on with what it has: %s", reason)

    def unfit(self, found: Found) -> None:
        """It does not fit what is trained, and will not until it changes."""
        self._unfit.add(found.digest)

    def _in_folder(self, store: CheckpointStore, which: Which, than: Found | None) -> Found | None:
        readable, unreadable = names.scan(store.directory)
        for path, reason in unreadable:
            if than is None or (names.named_iteration(path) or 0) > (than.iteration or 0):
                self.refuse(path, reason)
        if which != "best":
            return self._valid(store, reversed(readable), lambda found: self._fits(found) and _is_later(found, than))
        metric, mode = self.source.scored_by(store)
        sign = 1 if mode == "min" else -1

        def is_better(found: Found) -> bool:
            is_another = self._fits(found) and (than is None or found.identity != than.identity)
            if than is None or than.score is None or found.score is None:
                return is_another
            return is_another and sign * found.score < sign * than.score

        return self._valid(store, ranked(of_one_run(readable), metric, mode), is_better, metric)

    def _valid(
        self,
        store: CheckpointStore,
        candidates: Iterable[CheckpointInfo],
        is_wanted: Callable[[Found], bool],
        metric: str | None = None,
    ) -> Found | None:
        for path, manifest in ((checkpoint.path, checkpoint.manifest) for checkpoint in candidates):
            found = Found.of_checkpoint(path, manifest, metric)
            if not is_wanted(found):
                continue
            files = [path / name for name in (MANIFEST_NAME, *manifest.files)]
            reason = self._unless_known(path, files, lambda: "; ".join(store.verify(path)))  # noqa: B023  # called at once
            reason = reason or ("" if manifest.healthy else "its weights are not finite")
            if not reason:
                return found
            self.refuse(path, f"{path}: {reason.rstrip('.')}.")
        return None

    def _unless_known(self, path: Path, files: Iterable[Path], result: Callable[[], str]) -> str:
        """A result that was computed before, if none of the files has changed since."""
        now = tuple(signature(file) for file in files)
        if path not in self._known or self._known[path][0] != now:
            self._known[path] = now, result()
        return self._known[path][1]

    def _fits(self, found: Found) -> bool:
        return found.digest not in self._unfit

    def _is_other(self, found: Found, than: Found | None) -> bool:
        return self._fits(found) and (than is None or found.digest != than.digest)


def _is_later(found: Found, than: Found | None) -> bool:
    """Whether it is later: by the order of one run's saves, or by the clock if another run has the folder now."""
    if than is None or than.sequence is None or than.created_at is None:
        return True
    assert found.sequence is not None and found.created_at is not None
    return found.sequence > than.sequence or found.created_at > than.created_at


def _digest(manifest: Manifest) -> str:
    files = sorted((name, record.hash) for name, record in manifest.files.items())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _hash(path: Path) -> str:
    try:
        with open_regular(path.resolve()) as file:
            return hash_file(file).hash
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}.") from error


def load_sources(
    path: str | Path | Sequence[LoadSource], plan: LoadPlan | None, *, dynamic: bool = False
) -> list[LoadSource]:
    """The sources that are meant by one path and its plan, or by a list of them.

    Args:
        dynamic: whether some may be.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if isinstance(path, str | PathLike):
        check_type("plan", plan, plan is not None, "a LoadPlan beside a path")
        return [LoadSource(path, plan)]  # type: ignore[arg-type]  # checked
    sources = list(path)
    if plan is not None or not sources or not all(isinstance(source, LoadSource) for source in sources):
        raise ValueError("Give a path and its plan, or a list of LoadSource, each of which has its own plan.")
    if not dynamic and (other := next((source for source in sources if source.dynamic), None)):
        raise ValueError(f"{other.path} is dynamic: give the list to a ModelBank, which loads it again.")
    return sources
