"""A panel as a picture."""

import json

from ignite_engine.ext.report.charts import BUCKETS, chart, is_log, script_data
from ignite_engine.ext.report.panels import Line, Panel


def panel(*values, **options):
    line = Line("<a>", [(float(at), value) for at, value in enumerate(values)], 0)
    return Panel("Loss & more", "", [line], **options)


def test_an_axis_is_logarithmic_where_values_are_far_apart_and_positive():
    assert is_log(panel(1.0, 100.0, may_be_log=True))
    assert not is_log(panel(1.0, 100.0)) and not is_log(panel(1.0, 2.0, may_be_log=True))
    assert not is_log(panel(0.0, 100.0, may_be_log=True))


def test_stacked_lines_keep_their_own_values_at_the_same_places():
    lines = [Line(name, [(float(at), at * 2.0) for at in range(2000)], mark) for mark, name in enumerate("ab")]
    _, data = chart(Panel("Time", "ms", lines, stacked=True), 0)
    first, second = (line["points"] for line in data["lines"])
    assert data["stacked"] and first == second and len(first) == BUCKETS


def test_what_a_user_named_is_escaped():
    one = panel(1.0, 2.0)
    html, data = chart(one, 7)
    assert "Loss &amp; more" in html and 'data-chart="7"' in html
    (line,) = data["lines"]
    assert (line["name"], line["mark"], line["points"]) == ("<a>", 0, [[0, 1], [1, 2]])
    text = script_data([data])
    assert "<" not in text and json.loads(text) == [data]


def test_a_long_curve_is_thinned_and_keeps_its_peak():
    one = panel(*(1.0 + (each == 1234) for each in range(5000)))
    _, data = chart(one, 0)
    drawn = data["lines"][0]["points"]
    assert len(drawn) <= 4 * BUCKETS and [1234, 2] in drawn
