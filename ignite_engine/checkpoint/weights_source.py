"""The one reader of everything that weights can come from: a checkpoint or a file of weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from ignite_engine.checkpoint.in_use import read_chosen
from ignite_engine.checkpoint.manifest import Manifest
from ignite_engine.checkpoint.naming import Which, find_source, rule_of, split_name
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.errors import CheckpointError, one_line

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Verified parts on the CPU, from wherever they came."""

    path: Path
    parts: dict[str, Any]
    """By name. A file of weights has one, ``model``."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    manifest: Manifest | None = None
    """None for a file of weights."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """What each part is, as far as it is known."""
        return self.manifest.kinds if self.manifest else {"model": "model"}


def read_source(path: Path, rank: int = 0, *, mmap: bool = False, whole: bool = True) -> Source:
    """Read what :func:`find_source` found; each file of a checkpoint is verified first.

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


def read_named(
    path: str | Path,
    which: Which = "last",
    *,
    metric: str | None = None,
    mode: str | None = None,
    weights: str | None = None,
    use: Callable[[Source, str], T],
) -> T:
    """Read what :func:`find_source` finds, and choose its weights; no run that prunes deletes it meanwhile.

    Args:
        path, which, metric, mode: see :func:`find_source`.
        weights: ``raw``, or the part of an average; None: of the best those that its metric was measured of, otherwise
            ``raw``.
        use: takes the source, sharded tensors without their values, and its weights in these words.

    Returns:
        What ``use`` returns.

    Raises:
        CheckpointError, ValueError: see :func:`find_source`.
    """
    is_best = split_name(path, which)[1] == "best"

    def read(found: Path) -> T:
        source, chosen = read_source(found, whole=False), weights
        if chosen is None and is_best and source.manifest is not None:
            rule = rule_of(source.manifest)
            followed = metric or (rule and rule[0])
            chosen = source.manifest.weights_of(followed) if followed else None
        return use(source, chosen or "raw")

    return read_chosen(lambda: find_source(path, which, metric=metric, mode=mode), read)


def model_part(source: Source, part: str | None = None) -> str:
    """The part that is meant by the model: the one of that name, ``model``, or the only one of a model.

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
    except Exception as error:  # torch raises pickle, zip and runtime errors of many types here
        named = re.search(r"(?:GLOBAL |Unsupported (?:global|class|operand)[: ]+)([\w.]+)", str(error))
        reason = f"it refers to {named.group(1)}" if named else one_line(error)
        raise CheckpointError(
            f"{path} is not plain data ({reason}): it was not loaded and nothing in it was executed."
        ) from error
    if not isinstance(weights, dict) or not weights or not all(map(torch.is_tensor, weights.values())):
        raise CheckpointError(f"{path} does not hold a plain state_dict: expected a mapping of names to tensors.")
    return weights
