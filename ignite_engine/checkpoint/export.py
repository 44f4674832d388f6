"""Exports the weights of a checkpoint for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor

from ignite_engine.checkpoint.filesystem import replace_file
from ignite_engine.checkpoint.pack import DTYPES, Pack
from ignite_engine.checkpoint.part_names import averages
from ignite_engine.checkpoint.shards import whole
from ignite_engine.checkpoint.sources import Source, model_part
from ignite_engine.errors import CheckpointError, one_line, shapes_of

Format = Literal["safetensors", "state_dict"]


def weights_of(source: Source, weights: str = "raw") -> dict[str, Any]:
    """The model's whole tensors by name; ``weights``: the part whose averages replace what it averages, or ``raw``.

    Raises:
        CheckpointError: one line; the source holds no model, or no such average.
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
    """Write a file of weights atomically.

    Args:
        path: the file; an existing one is replaced.
        weights: name to tensor.
        kind: ``state_dict``: a ``torch.save`` of the mapping, which ``weights_only`` loads.
        about: metadata for the header of a safetensors file.

    Raises:
        CheckpointError: one line; it cannot be written, or the format cannot hold it.
    """
    if kind == "safetensors":
        for name, value in weights.items():
            if not isinstance(value, Tensor) or value.dtype not in DTYPES or value.layout is not torch.strided:
                raise CheckpointError(
                    f"{name} is {shapes_of(value)}, which safetensors cannot hold: use the format state_dict."
                )

    def write(file: IO[bytes]) -> None:
        if kind == "state_dict":
            torch.save(weights, file)
            return
        file.writelines(Pack(weights, about or {}).blocks())

    try:
        replace_file(path, write)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {one_line(error)}.") from error
