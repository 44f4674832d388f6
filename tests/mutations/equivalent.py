"""Drawn mutations that change no behaviour, each with the reason; another one is drawn instead."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "ignite_engine/states/repeated_event.py arguments: torch.equal(first, second) -> (torch.equal(second, first)) "
    "in return alike and torch.equal(first, second)": "Whether two tensors are equal does not depend on their order.",
}
