"""Intervals and durations: one unit, a bare number is the first one, and they are written back as they were."""

import pytest
from pydantic import ValidationError

from ignite_engine.config.intervals import Every, EveryOrMinutes, TimeLimit


@pytest.mark.parametrize(
    ("kind", "written", "unit", "number"),
    [
        (Every, 500, "iterations", 500),
        (Every, {"iterations": 500}, "iterations", 500),
        (Every, {"epochs": 2}, "epochs", 2),
        (Every, {"epochs": 0.25}, "epochs", 0.25),
        (Every, {"samples": 10000}, "samples", 10000),
        (EveryOrMinutes, {"tokens": 5}, "tokens", 5),
        (EveryOrMinutes, {"seconds": 30}, "seconds", 30),
        (EveryOrMinutes, {"minutes": 0.5}, "minutes", 0.5),
        (TimeLimit, 3600, "seconds", 3600),
        (TimeLimit, {"hours": 23.5}, "hours", 23.5),
    ],
)
def test_number_has_one_unit(kind, written, unit, number):
    interval = kind.model_validate(written)

    assert interval.model_dump() == (number if written == {"iterations": 500} else written)
    assert {name: value for name, value in dict(interval).items() if value is not None} == {unit: number}
    assert kind.model_validate(interval.model_dump()) == interval


@pytest.mark.parametrize(
    ("kind", "written", "complaint"),
    [
        (
            Every,
            0,
            "got 0 iterations, expected a number of iterations, such as 500, {epochs: 1}, {windows: 1}",
        ),
        (Every, True, "got true, expected"),
        (Every, {"windows": 1.5}, "got 1.5 windows, expected"),
        (Every, {"epochs": 0}, "got 0 epochs, expected"),
        (Every, {"seconds": 3}, "got the unit 'seconds', expected"),
        (Every, {"minutes": 1}, "got the unit 'minutes', expected"),
        (Every, {"epochs": 1, "iterations": 2}, "got the mapping {'epochs': 1, 'iterations': 2}, expected"),
        (EveryOrMinutes, {"minute": 1}, "did you mean 'minutes'?"),
        (TimeLimit, {"hours": 0}, "got 0 hours, expected"),
        (TimeLimit, float("inf"), "got inf seconds, expected"),
    ],
)
def test_what_is_not_an_interval_is_refused_with_what_was_given(kind, written, complaint):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(written)

    assert complaint in str(caught.value)


def test_what_yaml_reads_as_text_or_a_fraction_is_a_whole_number():
    for written in ("1e6", 1e6, 1000000):
        assert Every.model_validate({"tokens": written}) == Every(tokens=1000000)


def test_limit_is_in_seconds():
    totals = [TimeLimit.model_validate(each).total_s for each in (90, {"minutes": 1.5}, {"hours": 0.025})]

    assert totals == [90.0, 90.0, 90.0]
