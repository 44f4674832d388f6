"""Weights out of a checkpoint, for programs that know nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ignite_engine.checkpointing.filesystem import replace_file
from ignite_engine.checkpointing.part_names import averages
from ignite_engine.checkpointing.shards import whole
from ignite_engine.checkpointing.weights_source import Source, model_part, safetensors_torch
from ignite_engine.errors import CheckpointError, one_line

Format = Literal["safetensors", "state_dict"]


def weights_of(source: Source, weights: str = "raw") -> dict[str, Any]:
    """The model's state by name, with the averages of the part ``weights`` in the place of what it averages; whole.

    Raises:
        CheckpointError: one line; it holds no model, or no such average.
    """
    model = source.parts[model_part(source)]
    if weights == "raw":
        return {name: whole(value) for name, value in model.items()}
    known = averages(source.parts, source.kinds.get)
    if weights not in known:
        raise CheckpointError(
            f"{source.path} holds no average {weights!r}; expected raw{''.join(f' or {name}' for name in known)}."
        )
    return {name: whole(value) for name, value in {**model, **known[weights]}.items()}


def write_weights(path: Path, weights: dict[str, Any], kind: Format, *, about: dict[str, str] | None = None) -> None:
    """Write a file that is there whole or not at all.

    Args:
        path: the file; one that is there is replaced.
        weights: name to tensor.
        kind: ``state_dict``: a ``torch.save`` of the mapping, which ``weights_only`` loads.
        about: words in the header of a safetensors file.

    Raises:
        CheckpointError: one line; it cannot be written, or the format cannot hold it.
    """
    try:
        data = _safetensors(weights, about or {}) if kind == "safetensors" else None
        replace_file(path, lambda file: torch.save(weights, file) if data is None else file.write(data))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {one_line(error)}.") from error


def _safetensors(weights: dict[str, Any], about: dict[str, str]) -> bytes:
    writer = safetensors_torch()
    foreign = next((name for name, value in weights.items() if not isinstance(value, Tensor)), None)
    if foreign is not None:
        raise CheckpointError(
            f"{foreign} is a {type(weights[foreign]).__name__}, safetensors holds tensors only: use the format "
            "state_dict."
        )
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, value in weights.items():  # no two of a file may share memory, as tied weights do
        memory = value.untyped_storage().data_ptr()
        apart[name] = value.clone() if memory in seen else value.contiguous()
        seen.add(memory)
    try:
        data: bytes = writer.save(apart, metadata={"format": "pt", **about})
    except Exception as error:  # of the Rust library
        raise CheckpointError(f"safetensors cannot hold these weights: {one_line(error)}.") from error
    return data
