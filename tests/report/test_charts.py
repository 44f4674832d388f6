"""A panel as a picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from ignite_engine.report.charts import BUCKETS, HEIGHT, WIDTH, Axes, chart, script_data, span_of, svg_file
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


def test_stacked_lines_reach_up_to_their_sum() -> None:
    lines = [Line(name, [(0.0, 1.0), (1.0, 3.0)], mark) for mark, name in enumerate("ab")]
    stacked = Panel("Time", "ms", lines, stacked=True)
    assert Axes(stacked).top > 6.0 and Axes(stacked).bottom == 0.0
    assert chart(stacked, 0, span_of([stacked]))[0].count('class="area') == 2


def test_what_a_user_named_is_escaped() -> None:
    one = panel(1.0, 2.0)
    html, data = chart(one, 7, span_of([one]))
    assert "&lt;a&gt;" in html and "<a>" not in html and "Loss &amp; more" in html and 'data-chart="7"' in html
    assert data["lines"] == [{"name": "<a>", "mark": 0, "points": [[0, 1], [1, 2]]}]
    text = script_data([data])
    assert "<" not in text and json.loads(text) == [data]


def test_a_long_curve_is_thinned_and_keeps_its_peak() -> None:
    one = panel(*(1.0 + (each == 1234) for each in range(5000)))
    _, data = chart(one, 0, span_of([one]))
    drawn = data["lines"][0]["points"]
    assert len(drawn) <= 4 * BUCKETS and [1234, 2] in drawn


def test_a_file_of_its_own_is_a_whole_picture() -> None:
    root = ElementTree.fromstring(svg_file(panel(1.0, 2.0)))
    assert root.tag.endswith("svg") and root.get("width") == "720"
    assert [each.text for each in root.iter() if each.text == "Loss & more"] and len([*root.iter()]) > 5
