"""Short labels, and fewer points that keep every extreme."""

import pytest

from ignite_engine.ext.report.scales import averaged, thin
from ignite_engine.text import short


@pytest.mark.parametrize(
    ("value", "label"),
    [(0, "0"), (1.5, "1.5"), (12_345, "12.35k"), (2e-5, "2e-5"), (1.25e6, "1.25M"), (-3e9, "-3G")],
)
def test_labels_are_short(value, label):
    assert short(value) == label


def test_thinned_curve_keeps_first_last_and_every_extreme():
    points = [(float(x), 0.0) for x in range(10_000)]
    points[1234], points[8765] = (1234.0, 9.0), (8765.0, -9.0)
    kept = thin(points, 100)

    assert len(kept) <= 400 and kept == sorted(kept)
    assert {points[0], points[-1], points[1234], points[8765]} <= set(kept)
    assert thin(points[:50], 100) == points[:50]


def test_average_of_each_bucket_keeps_the_mean():
    points = [(float(x), float(x % 2)) for x in range(1000)]

    assert averaged(points, 10)[0] == (49.5, 0.5) and len(averaged(points, 10)) == 10
