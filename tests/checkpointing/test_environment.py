"""Which differences of two environments may change the bits of a run."""

from __future__ import annotations

import pytest

from ignite_engine.checkpointing.environment import environment_values, inexact_reasons


def test_the_same_environment_gives_no_reason() -> None:
    values = environment_values(2)
    assert values["world_size"] == 2 and inexact_reasons(values, environment_values(2)) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"world_size": 4}, "ranks: 4 when it was saved, 2 now"),
        ({"threads": 1000}, "threads: 1000 when it was saved"),
        ({"devices": ["A", "B"]}, "devices: A, B when it was saved, none now"),
        ({"runtime": "CUDA 1.0"}, "torch's runtime: CUDA 1.0 when it was saved, none now"),
    ],
)
def test_what_decides_the_bits_is_named(change: dict[str, object], reason: str) -> None:
    now = environment_values(2) | {"devices": [], "runtime": None}
    (found,) = inexact_reasons({**now, **change}, now)
    assert found.startswith(reason)


def test_what_does_not_decide_or_was_not_recorded_is_ignored() -> None:
    now = environment_values(1)
    assert inexact_reasons({**now, "command": ["other"], "platform": "other", "cpus": 0}, now) == []
    assert inexact_reasons({}, now) == []
