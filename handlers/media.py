"""Images, texts and histograms: what ``state.media`` takes, and the sink that keeps them as files."""

from __future__ import annotations

import json
import re
import struct
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import numpy as np
import torch

from ignite_engine.checkpointing.filesystem import replace_file
from ignite_engine.handlers.sinks import JSONLSink

BINS = 64
CHANNELS = (1, 3, 4)


class Image:
    """A picture for ``state.media``; it is read from the device when it is logged, on rank 0 only.

    Args:
        pixels: a tensor or an array of shape ``(height, width)``, ``(height, width, channels)`` or
            ``(channels, height, width)``, with 1 (grey), 3 (RGB) or 4 (RGBA) channels; uint8, or numbers from 0 to 1,
            beyond which they are clipped.

    Raises:
        ValueError: it has another shape.
    """

    kind = "image"

    def __init__(self, pixels: Any) -> None:
        self._pixels = pixels.detach() if isinstance(pixels, torch.Tensor) else np.asarray(pixels)
        shape = tuple(self._pixels.shape)
        self._channels_first = len(shape) == 3 and shape[2] not in CHANNELS
        if len(shape) not in (2, 3) or 0 in shape or (self._channels_first and shape[0] not in CHANNELS):
            raise ValueError(
                f"Image got the shape {shape}, expected (height, width), (height, width, channels) or (channels, "
                "height, width) with 1, 3 or 4 channels."
            )

    def content(self) -> tuple[Any, ...]:
        return (self.pixels,)

    @cached_property
    def pixels(self) -> np.ndarray[Any, Any]:
        """Shape ``(height, width, channels)``, uint8."""
        pixels = self._pixels
        if isinstance(pixels, torch.Tensor):  # NumPy has no bfloat16
            pixels = (pixels.float() if pixels.is_floating_point() else pixels).cpu().numpy()
        if pixels.dtype != np.uint8:
            pixels = (np.clip(np.nan_to_num(pixels.astype(np.float32)), 0.0, 1.0) * 255).round().astype(np.uint8)
        pixels = pixels.transpose(1, 2, 0) if self._channels_first else pixels
        return np.ascontiguousarray(pixels if pixels.ndim == 3 else pixels[:, :, None])


class Histogram:
    """The distribution of many numbers for ``state.media``: of the finite ones, in 64 bins of equal width.

    Args:
        values: a tensor or an array; counted on its device when it is logged, on rank 0 only.
    """

    kind = "histogram"

    def __init__(self, values: Any) -> None:
        self._values = torch.as_tensor(values).detach()

    def content(self) -> tuple[Any, ...]:
        return self.bins

    @cached_property
    def bins(self) -> tuple[list[float], list[float]]:
        """Counts, and the edges of the bins, which are one more."""
        values = self._values.flatten().float()
        values = values[torch.isfinite(values)]
        low, high = (bound.item() for bound in torch.aminmax(values)) if values.numel() else (0.0, 0.0)
        if low == high:
            low, high = low - 0.5, high + 0.5
        counts = torch.histc(values, BINS, low, high) if values.numel() else torch.zeros(BINS)
        return counts.tolist(), np.linspace(low, high, BINS + 1).tolist()


class MediaFiles:
    """A sink that keeps images, texts and histograms as files in the run's ``media`` folder, and lists them there.

    ``media/index.jsonl`` has one line per iteration: ``{"iteration": 100, "val/worst": "val/worst/00000100.png"}``; the
    ending tells the kind: ``.png``, ``.txt``, ``.json`` (``counts`` and ``edges``). Nothing is made without media. A
    resumed run removes the later lines and writes the files again.

    Args:
        directory: of the run.
        name: in checkpoints.
    """

    def __init__(self, directory: str | Path, *, name: str = "media") -> None:
        self.folder, self.name = Path(directory).absolute() / "media", name
        self._index = JSONLSink(self.folder / "index.jsonl")

    def image(self, name: str, iteration: int, pixels: np.ndarray[Any, Any]) -> None:
        self._keep(name, iteration, ".png", png(pixels))

    def text(self, name: str, iteration: int, text: str) -> None:
        self._keep(name, iteration, ".txt", text.encode())

    def histogram(self, name: str, iteration: int, counts: list[float], edges: list[float]) -> None:
        self._keep(name, iteration, ".json", json.dumps({"counts": counts, "edges": edges}).encode())

    def state_dict(self) -> dict[str, Any]:
        return self._index.state_dict()

    def flush_to_disk(self) -> None:
        self._index.flush_to_disk()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._index.load_state_dict(state)

    def _keep(self, name: str, iteration: int, ending: str, content: bytes) -> None:
        if idist.get_rank() != 0:
            return
        parts = [re.sub(r"[^\w.+ -]", "_", part) for part in name.split("/") if part.strip(". ")]
        file = "/".join([*parts, f"{iteration:08d}{ending}"])
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda whole: whole.write(content))
        self._index.write(iteration, {name: file})


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG file of pixels of shape ``(height, width, channels)``, uint8.

    Source: Portable Network Graphics (PNG) Specification, W3C, sections 5, 10 and 11.
    """
    height, width, channels = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    colours = {1: 0, 3: 2, 4: 6}[channels]
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
