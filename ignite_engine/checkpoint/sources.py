"""Finds and reads what weights are loaded from: a checkpoint or a file, given by a path or a name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

from ignite_engine.checkpoint import layout
from ignite_engine.checkpoint.filesystem import Signature, hash_file, open_regular, signature
from ignite_engine.checkpoint.lock import read_chosen
from ignite_engine.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from ignite_engine.checkpoint.part_names import Patterns
from ignite_engine.checkpoint.retention import CheckpointInfo, of_one_run, ranked
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import CheckpointError, check_type, did_you_mean, one_line

Which = Literal["last", "best"]
"""The newest valid checkpoint of a folder, or the valid one with the best score."""
NAMES: tuple[str, ...] = get_args(Which)
RUNS_FOLDER = "checkpoints"


class NothingThere(CheckpointError):
    """A path does not exist, or holds no checkpoint."""


def split_name(path: str | Path) -> tuple[Path, Which]:
    """Split ``runs/x/best`` into ``runs/x`` and ``best``, unless that very path exists; other paths mean the last."""
    path = Path(path)
    if path.name in NAMES and not path.exists():
        return path.parent, path.name  # type: ignore[return-value]  # it is one of them
    return path, "last"


def is_single(path: Path) -> bool:
    """Whether a path is that of a single checkpoint, or of a file of weights."""
    is_named_as_one = layout.named_iteration(path) is not None and path.exists()
    return path.is_file() or is_named_as_one or (path / MANIFEST_NAME).exists()


def find_directory(path: str | Path) -> Path:
    """The folder of checkpoints that a path means: itself, or the one in a run's folder.

    Raises:
        NothingThere: one line.
    """
    path = Path(path)
    if not path.exists():
        near = did_you_mean(path.name, NAMES)
        hint = near if near.startswith("; did") else "."
        raise NothingThere(
            f"{path} does not exist; expected a run's folder, a folder of checkpoints or, to load, a file of "
            f"weights{hint}"
        )
    for candidate in (path, path / RUNS_FOLDER):
        if any(layout.scan(candidate)):
            return candidate
    raise NothingThere(f"{path} holds no checkpoint; expected a run's folder or a folder of checkpoints.")


def find_source(path: str | Path) -> Path:
    """The checkpoint or file that a path means; in a folder of checkpoints or of a run, the last or best valid one.

    Args:
        path: a file of weights, a checkpoint, or a folder; a folder may be followed by a name: ``runs/x/best``.

    Raises:
        CheckpointError: one line; there is none, none is valid, or the run has followed no metric.
    """
    place, which = split_name(path)
    if is_single(place):
        if which == "best":
            raise CheckpointError(f"{place} is one checkpoint: give the folder of its run to have the best of them.")
        return place
    store = CheckpointStore(find_directory(place))
    if which == "best":
        metric, mode = rule_of_best(store)
        best = store.best(metric, mode)
        if best is None:
            raise CheckpointError(f"{place} holds no valid checkpoint with {metric}.")
        return best.path
    newest = store.latest()
    if newest.checkpoint is None:
        reasons = "; ".join(f"{path.name}: {reason.rstrip('.')}" for path, reason in newest.skipped)
        raise CheckpointError(f"{place} holds no valid checkpoint ({reasons}).")
    return newest.checkpoint.path


def rule_of_best(store: CheckpointStore) -> tuple[str, str]:
    """Metric and mode that the run of the newest checkpoint followed.

    Raises:
        CheckpointError: it followed none.
    """
    if (rule := followed(store.checkpoints())) is None:
        raise CheckpointError(
            f"{store.directory}: no metric was followed, so none is the best; train with "
            "Checkpoint(best='val/loss', mode='min'), in a config best and mode of handlers.Checkpoint."
        )
    return rule


def followed(checkpoints: Sequence[CheckpointInfo]) -> tuple[str, str] | None:
    """Metric and mode that the run of the newest checkpoint followed; None: it followed none."""
    return next(
        (rule for checkpoint in reversed(checkpoints) if (rule := rule_of(checkpoint.manifest)) is not None), None
    )


def rule_of(manifest: Manifest) -> tuple[str, str] | None:
    """Metric and mode by which the run kept its best; None: by none."""
    return None if manifest.best is None else (manifest.best["metric"], manifest.best["mode"])


T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """The verified content of a checkpoint or a file of weights, on the CPU."""

    path: Path
    parts: dict[str, Any]
    """States by name; a file of weights has only ``model``."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    manifest: Manifest | None = None
    """None for a file of weights."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """The known kinds of the parts."""
        return self.manifest.kinds if self.manifest else {"model": "model"}


def read_source(path: Path, rank: int = 0, *, mmap: bool = False, whole: bool = True) -> Source:
    """Read a result of :func:`find_source`; each file of a checkpoint is verified first.

    A rank that did not exist when a checkpoint was saved gets rank 0's own parts, but not its random numbers.

    Args:
        path: a checkpoint's directory, a file of ``safetensors``, or one of ``torch.save`` that holds a state_dict.
        rank: whose parts.
        mmap, whole: see :meth:`CheckpointStore.load`.

    Raises:
        CheckpointError: one line; missing, damaged, or not plain data (nothing was executed).
    """
    if path.is_file():
        return Source(path, {"model": _read_weights(path)})
    store = CheckpointStore(path.parent)
    loaded = store.load(path, rank, mmap=mmap, whole=whole)
    local = loaded.local
    if not local and rank:
        local = store.load(path, 0, mmap=mmap, whole=whole, shared=False).local
        local = {name: part for name, part in local.items() if name != "rng"}
    return Source(path, {**loaded.shared, **local}, loaded.manifest.left_out, loaded.manifest)


def read_named(path: str | Path, *, weights: str | None = None, use: Callable[[Source, str], T]) -> T:
    """Find a source and read it, while no run can delete it.

    Args:
        path: see :func:`find_source`.
        weights: ``raw``, or the name of an average; None: for the best, those for which its metric was measured,
            otherwise ``raw``.
        use: called with the source (sharded tensors are :class:`Sharded`) and the chosen weights.

    Returns:
        What ``use`` returns.

    Raises:
        CheckpointError: see :func:`find_source`.
    """
    is_best = split_name(path)[1] == "best"

    def read(found: Path) -> T:
        source, chosen = read_source(found, whole=False), weights
        if chosen is None and is_best and source.manifest is not None and (rule := rule_of(source.manifest)):
            chosen = source.manifest.weights_of(rule[0])
        return use(source, chosen or "raw")

    return read_chosen(lambda: find_source(path), read)


def model_part(source: Source, part: str | None = None) -> str:
    """The name of the model's part: the one given, the only one of kind ``model``, or ``model``.

    Raises:
        CheckpointError: one line; there is none, or several.
    """
    models = [name for name in source.parts if source.kinds.get(name) == "model"]
    if part is None:
        part = models[0] if len(models) == 1 else "model"
    if part in source.parts:
        return part
    if models:
        raise CheckpointError(f"{source.path} holds no {part}; its models: {', '.join(models)}: give part=.")
    raise CheckpointError(f"{source.path} holds no {part}; its parts: {', '.join(sorted(source.parts)) or 'none'}.")


def _read_weights(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        try:
            from safetensors import safe_open
            from safetensors.torch import load_file
        except ImportError:
            raise CheckpointError(f"To read {path} needs a package: pip install safetensors.") from None
        try:
            weights: dict[str, Any] = load_file(path)
            with safe_open(path, "pt") as opened:
                tied = opened.metadata() or {}
            return weights | {name: weights[kept] for name, kept in tied.items() if kept in weights}
        except Exception as error:  # of the Rust library
            raise CheckpointError(f"{path} is not a safetensors file: {one_line(error)}.") from error
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}.") from error
    except Exception as error:  # torch.load raises errors of many types
        named = re.search(r"(?:GLOBAL |Unsupported (?:global|class|operand)[: ]+)([\w.]+)", str(error))
        reason = f"it refers to {named.group(1)}" if named else one_line(error)
        raise CheckpointError(
            f"{path} is not plain data ({reason}): it was not loaded and nothing in it was executed."
        ) from error
    if not isinstance(weights, dict) or not weights or not all(map(torch.is_tensor, weights.values())):
        raise CheckpointError(f"{path} does not hold a plain state_dict: expected a mapping of names to tensors.")
    return weights


logger = logging.getLogger(__name__)

Rename = Callable[[str], str | None]


@dataclass(frozen=True)
class Found:
    """A checkpoint or a file of weights that a source means.

    Attributes:
        identity: of a checkpoint, of the save, so it changes when the checkpoint is saved again but not with labels and
            metrics; of a file of weights, the hash of its content.
        iteration: of the checkpoint; None for a file of weights.
    """

    path: Path
    identity: str
    iteration: int | None = None

    @classmethod
    def of(cls, path: Path) -> Found:
        """The checkpoint or file at this path.

        Raises:
            CheckpointError: one line; it cannot be read.
        """
        if path.is_file():
            return cls(path, _hash(path.resolve(), signature(path.resolve())))
        manifest = read_manifest(path)
        return cls(path, f"{manifest.run_id} {manifest.sequence} {manifest.created_at}", manifest.iteration)

    def read(self, rank: int, *, mmap: bool = False) -> Source:
        """Read it; see :func:`read_source`.

        Raises:
            CheckpointError: one line; it cannot be read, or was replaced meanwhile.
        """
        source = read_source(self.path, rank, mmap=mmap, whole=False)
        if Found.of(self.path) != self:
            raise CheckpointError(f"{self.path} was replaced while it was read.")
        return source


@dataclass(frozen=True)
class LoadSource:
    """A source of weights, and what to load from it. If several sources in a list contain a name, the last one wins.

    Args:
        path: a checkpoint, a folder of checkpoints or of a run, or a file of weights (safetensors, or a state_dict of
            ``torch.save``). A folder may be followed by a name: ``runs/x/best``.
        parts: parts by name or kind (``model``, ``optimizer``, ``schedule``, ``counters``, ``data``,
            ``rng``), or names inside them: ``["model:backbone.*", "optimizer"]``; ``["*"]`` is everything.
        rename: a function from a name in the source to the name here, in the model, its optimizers and its averages;
            None leaves the name out. Or a mapping of prefixes, ``{"encoder.": "backbone."}``; the first match counts.
            Patterns refer to the new names.
        ignore: parts and names that stay as they were built, wherever they are missing: ``["model:head.*", "ema"]``.
        strict: names missing on either side, or of another shape, are an error; otherwise they stay as built.
        weights: ``raw``, or the part that holds an average (``ema``), which is then loaded as the model.
        required: False: the source may be missing; if it exists, it must be valid.
        dynamic: a :class:`~ignite_engine.handlers.model_bank.ModelBank` loads it again during training when there is a
            newer one.

    An optimizer's options (learning rate, betas) are loaded only together with the counters and all of its parameters;
    a run that counts from 0 keeps its own.

    Raises:
        TypeError, ValueError: a value is of another type, or is not one of those above; ``data`` without
            ``counters``; a dynamic source with more than weights and optimizers.
    """

    path: str | Path
    parts: Sequence[str] = ("model",)
    rename: Rename | Mapping[str, str] | None = None
    ignore: Sequence[str] = ()
    strict: bool = True
    weights: str = "raw"
    required: bool = True
    dynamic: bool = False

    def __post_init__(self) -> None:
        check_type("path", self.path, bool(self.path) and isinstance(self.path, str | PathLike), "a path")
        for name in ("strict", "required", "dynamic"):
            check_type(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        rename = self.rename
        is_rename = rename is None or callable(rename) or isinstance(rename, Mapping)
        check_type("rename", rename, is_rename, "a function or a mapping of prefixes")
        Patterns(self.parts, "parts"), Patterns(self.ignore, "ignore")
        if "data" in self.parts and not {"counters", "trainer", "*"} & set(self.parts):
            raise ValueError(
                "parts has 'data' without 'counters': a run that counts from 0 starts its data from the beginning."
            )
        if self.dynamic and {"counters", "trainer", "data", "rng", "*"} & set(self.parts):
            raise ValueError(
                f"A dynamic source is loaded while training: its parts are model, optimizer or averages, got "
                f"{list(self.parts)}."
            )

    def renamed(self, name: str) -> str | None:
        """Apply ``rename`` to a name in the source."""
        if self.rename is None or callable(self.rename):
            return name if self.rename is None else self.rename(name)
        old = next((old for old in self.rename if name.startswith(old)), None)
        return name if old is None else self.rename[old] + name.removeprefix(old)

    def find(self) -> Found | None:
        """The checkpoint or file that the source means now, verified; None: it is not required and does not exist.

        Raises:
            CheckpointError: one line; there is none, or none that is valid.
        """
        try:
            return Found.of(find_source(self.path))
        except NothingThere:
            if self.required:
                raise
            return None

    def look(self) -> Found | None:
        """The checkpoint or file that the source means now, unverified; None: there is none.

        Raises:
            CheckpointError: one line; it cannot be read, or the best is not defined.
        """
        place, which = split_name(self.path)
        if is_single(place):
            return Found.of(place)
        store = CheckpointStore(find_directory(place))
        known = store.checkpoints()
        if which == "best":
            known = ranked(of_one_run(known), *rule_of_best(store))[::-1]
        return Found.of(known[-1].path) if known else None


class SourceWatch:
    """Looks on one rank whether a source means another checkpoint or file; warns once of each that is refused."""

    def __init__(self, source: LoadSource) -> None:
        self.source = source
        self._refused: set[Any] = set()

    def newer(self, than: Found | None) -> Found | None:
        """The checkpoint or file that the source means, if it is not ``than`` and is valid; else None.

        A refused one is tried again when its files have changed.
        """
        try:
            found = self.source.look()
            if found is None or (than is not None and found.identity == than.identity):
                return None
            if self._refused and _state(found) in self._refused:
                return None
            problem = _problem(found)
        except (CheckpointError, OSError) as error:  # its run may have pruned it meanwhile
            logger.debug("A source is not there: %s", error)
            return None
        if problem:
            self.refuse(found, f"{found.path}: {problem.rstrip('.')}.")
        return None if problem else found

    def refuse(self, found: Found, reason: str) -> None:
        """Warn that it is not loaded, and do not try it again."""
        self._refused.add(_state(found))
        if found.path.exists():
            logger.warning("A newer source is refused, and training goes on with what it has: %s", reason)


def _state(found: Found) -> Any:
    files = sorted(found.path.iterdir()) if found.path.is_dir() else ()
    return found, *map(signature, files)


def _problem(found: Found) -> str:
    """The reason not to load it; empty if it is sound."""
    if found.iteration is None:  # a file of weights
        return ""
    problems = CheckpointStore(found.path.parent).verify(found.path)
    return "; ".join(problems) or ("" if read_manifest(found.path).healthy else "its weights are not finite")


@lru_cache(maxsize=16)
def _hash(path: Path, state: Signature | None) -> str:
    """The hash of a file, cached by ``state``, which changes with the file."""
    try:
        with open_regular(path) as file:
            return hash_file(file).hash
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}.") from error


def load_sources(path: str | Path | Iterable[LoadSource], options: Mapping[str, Any]) -> list[LoadSource]:
    """The sources given by one path with options, or by a list.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if isinstance(path, str | PathLike):
        return [LoadSource(path, **options)]
    sources = list(path)
    if options or not sources or not all(isinstance(source, LoadSource) for source in sources):
        raise ValueError("Give a path and its options, or a list of LoadSource, each of which has its own.")
    return sources
