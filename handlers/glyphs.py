"""Numbers and words in a picture, by letters of three columns and five rows: no plotting package is needed."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# five rows of three bits each
_LETTERS = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71111",
    "8": "75757", "9": "75717", ".": "00002", "-": "00700", "+": "02720", "k": "45655", "M": "57755",
    "c": "07447", "d": "11757", "e": "07747", "i": "20222", "p": "07574", "r": "06544", "t": "27223", "u": "05557",
}  # fmt: skip
HEIGHT, WIDTH = 5, 4


def drawn(text: str, size: int = 1) -> Array:
    """The text, True where it is dark; shape ``(5 * size, width_of(text, size))``. Other letters are gaps."""
    rows = [[int(digit) for digit in _LETTERS.get(letter, "00000")] for letter in text]
    bits = [[(row[line] >> shift) & 1 for row in rows for shift in (2, 1, 0, 8)] for line in range(HEIGHT)]
    picture = np.array(bits, bool).reshape(HEIGHT, -1)[:, : max(WIDTH * len(text) - 1, 0)]
    return np.kron(picture, np.ones((size, size), bool))


def width_of(text: str, size: int = 1) -> int:
    return max(WIDTH * len(text) - 1, 0) * size


def write(picture: Array, text: str, centre: tuple[int, int], size: int, shade: float) -> None:
    """Draw the text into a picture around a pixel ``(row, column)``; it must have room there."""
    letters = drawn(text, size)
    top, left = centre[0] - letters.shape[0] // 2, centre[1] - letters.shape[1] // 2
    picture[top : top + letters.shape[0], left : left + letters.shape[1]][letters] = shade


def brief(value: float) -> str:
    """A number in few letters: ``1234``, ``12k``, ``.25``."""
    if value == round(value) and abs(value) < 10_000:
        return str(round(value))
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            return f"{value / unit:.0f}{letter}"
    return f"{value:.2f}".replace("0.", ".") if abs(value) < 10 else f"{value:.0f}"
