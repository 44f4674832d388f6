"""Objects of a user whose state a checkpoint does not hold, and one whose state it does."""

from __future__ import annotations

from typing import Any


class Saved:
    name = "saved"

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> None:
        self.number += 1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]
