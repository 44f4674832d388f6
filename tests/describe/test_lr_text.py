"""The learning rate over a run as a plot in characters."""

import pytest

from ignite_engine.describe.lr_text import lr_text


class Steps:
    """Rates of two groups; the second's is a tenth."""

    def lrs_at(self, step):
        return [0.5 * (step + 1) / 100, 0.05 * (step + 1) / 100, 0.05 * (step + 1) / 100]


@pytest.mark.row("E4")
def test_rate_is_plotted_in_characters():
    lines = lr_text(Steps(), 100)
    plot = lines[-14:-2]

    assert lines[1:12] == [f"  {n:>9}  {0.005 * n:.4e}" for n in (1, 11, 21, 31, 41, 51, 60, 70, 80, 90, 100)]
    assert all(line[12] == "|" and len(line) <= 73 for line in plot)
    columns = [sum(len(line) > 13 + at and line[13 + at] == "#" for line in plot) for at in range(60)]
    assert columns == sorted(columns) and (columns[0], columns[30], columns[59]) == (0, 6, 12)
    assert (lines[-14].split()[0], lines[-8].split()[0], lines[-2].split()[0]) == ("0.5", "0.25", "0")
    assert lines[-1].split() == ["update", "1", "50.5", "100"] and len(lines[-1]) == 73


def test_one_update_can_be_plotted():
    assert len(lr_text(Steps(), 1)) > 12
