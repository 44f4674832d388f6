"""Which differences of two environments may change the bits of a run."""

from ignite_engine.checkpointing.environment import environment_values, inexact_reasons


def test_the_same_environment_gives_no_reason():
    values = environment_values(2)
    assert values["world_size"] == 2 and inexact_reasons(values, environment_values(2)) == []


def test_what_does_not_decide_or_was_not_recorded_is_ignored():
    now = environment_values(1)
    assert inexact_reasons({**now, "command": ["other"], "platform": "other", "cpus": 0}, now) == []
    assert inexact_reasons({}, now) == []
