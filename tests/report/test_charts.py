"""A panel as a picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from ignite_engine.report.charts import BUCKETS, HEIGHT, WIDTH, Axes, chart, script_data, svg_file
from ignite_engine.report.panels import Line, Panel


def panel(*values: float, **options: object) -> Panel:
    line = Line("<a>", [(float(at), value) for at, value in enumerate(values)], 0)
    return Panel("Loss & more", "", [line], **options)  # type: ignore[arg-type]  # a test's own


def test_axes_span_the_picture_and_every_value_lies_in_it() -> None:
    axes = Axes(panel(3.0, 1.0, 2.0, from_zero=False))
    assert (axes.x(0), axes.x(2)) == (0.0, WIDTH)
    assert 0 <= axes.y(3.0) < axes.y(2.0) < axes.y(1.0) <= HEIGHT
    assert axes.x_ticks == [0, 1, 2] and all(0 <= axes.y(tick) <= HEIGHT for tick in axes.y_ticks)


def test_an_axis_begins_at_zero_if_it_should() -> None:
    assert Axes(panel(3.0, 4.0)).y(0.0) == pytest.approx(HEIGHT)
    assert Axes(panel(3.0, 4.0, from_zero=False)).y(0.0) > HEIGHT


def test_an_axis_is_logarithmic_where_values_are_far_apart_and_positive() -> None:
    assert Axes(panel(1.0, 100.0, may_be_log=True)).is_log
    assert not Axes(panel(1.0, 100.0)).is_log and not Axes(panel(1.0, 2.0, may_be_log=True)).is_log
    assert not Axes(panel(0.0, 100.0, may_be_log=True)).is_log


def test_a_constant_has_an_axis_too() -> None:
    axes = Axes(panel(2.0, 2.0, from_zero=False))
    assert axes.bottom < 2.0 < axes.top and 0 < axes.y(2.0) < HEIGHT


def test_stacked_lines_keep_their_own_values_at_the_same_places() -> None:
    lines = [Line(name, [(float(at), at * 2.0) for at in range(2000)], mark) for mark, name in enumerate("ab")]
    _, data = chart(Panel("Time", "ms", lines, stacked=True), 0)
    first, second = (line["points"] for line in data["lines"])
    assert data["stacked"] and first == second and len(first) == BUCKETS


def test_what_a_user_named_is_escaped() -> None:
    one = panel(1.0, 2.0)
    html, data = chart(one, 7)
    assert "Loss &amp; more" in html and 'data-chart="7"' in html
    (line,) = data["lines"]
    assert (line["name"], line["mark"], line["points"]) == ("<a>", 0, [[0, 1], [1, 2]])
    text = script_data([data])
    assert "<" not in text and json.loads(text) == [data]


def test_a_long_curve_is_thinned_and_keeps_its_peak() -> None:
    one = panel(*(1.0 + (each == 1234) for each in range(5000)))
    _, data = chart(one, 0)
    drawn = data["lines"][0]["points"]
    assert len(drawn) <= 4 * BUCKETS and [1234, 2] in drawn


def test_a_file_of_its_own_is_a_whole_picture() -> None:
    root = ElementTree.fromstring(svg_file(panel(1.0, 2.0)))
    assert root.tag.endswith("svg") and root.get("width") == "720"
    assert [each.text for each in root.iter() if each.text == "Loss & more"] and len([*root.iter()]) > 5
