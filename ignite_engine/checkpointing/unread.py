"""Tensors of a checkpoint whose values are on disk until they are needed."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Unread(Tensor):
    """Shape and type of a saved tensor (on the meta device)."""

    def read(self) -> Tensor:
        """The whole tensor, on the CPU.

        Raises:
            CheckpointError: a file that holds some of it is damaged.
        """
        raise NotImplementedError


def whole(value: Any) -> Any:
    """The tensor that an :class:`Unread` stands for; anything else as it is."""
    return value.read() if isinstance(value, Unread) else value
