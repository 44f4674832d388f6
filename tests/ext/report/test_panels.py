"""Which curves share a chart."""

from pathlib import Path

import pytest

from ignite_engine.ext.report.panels import compared_panels, panels_of
from ignite_engine.ext.report.records import Record


def points(*values):
    return [(float(at), value) for at, value in enumerate(values, 1)]


def titles(panels):
    return [panel.title for panel in panels]


def run(**series):
    return Record(Path("run"), {name.replace("__", "/"): list(each) for name, each in series.items()})


def test_the_loss_of_training_and_of_each_set_share_the_first_panel():
    panels = panels_of(run(lr=points(1, 2), loss=points(3, 2), val__loss=points(4, 3), epoch=points(1, 1)))
    assert titles(panels) == ["Loss", "Learning rate"]
    assert [line.name for line in panels[0].lines] == ["train", "val"] and panels[0].may_be_log


@pytest.mark.row("F11")
def test_parts_of_a_loss_share_a_chart_with_those_of_the_sets():
    series = {"loss": points(3, 2), "loss__kl": points(1, 1), "loss__pixels": points(2, 1), "val__kl": points(1, 2)}
    series |= {"val__loss": points(3, 3), "val__accuracy": points(0, 1)}
    panels = panels_of(run(**series))

    assert titles(panels) == ["Loss", "Parts of the loss", "accuracy"]
    assert [line.name for line in panels[0].lines] == ["train", "val"]
    lines = [(line.name, line.mark, line.dashed) for line in panels[1].lines]
    assert lines == [("kl", 0, False), ("kl, val", 0, True), ("pixels", 1, False)]


def test_what_the_engine_measures_of_itself_comes_last():
    series = {"throughput__steps_per_s": points(1, 2), "time__step_ms": points(1, 2), "memory__peak_mib": points(1, 2)}
    panels = panels_of(run(**series, mine=points(1, 2), lr=points(1, 2), loss=points(1, 2)))

    assert titles([panel for panel in panels if not panel.of_engine]) == ["Loss", "Learning rate", "mine"]
    assert titles(panels[3:]) == ["Throughput", "Time per iteration", "Memory of the device"]
    assert all(panel.of_engine for panel in panels[3:])
    (lr, time) = compared_panels([run(lr=points(1, 2), time__step_ms=points(1, 2))], ["a"])
    assert (lr.of_engine, time.of_engine) == (False, True)


def test_a_series_of_one_point_and_a_metric_that_never_moves_are_left_out():
    assert panels_of(run(loss=points(3), val__accuracy=points(0.5, 0.5))) == []
    assert titles(panels_of(run(val__accuracy=points(0.5, 0.6)))) == ["accuracy"]


def test_the_parts_of_the_time_are_stacked_up_to_the_whole():
    series = {"time__step_ms": points(10, 10), "time__data_wait_ms": points(2, 11), "time__optimizer_ms": points(1, 1)}
    (panel,) = panels_of(run(**series))
    assert panel.stacked and [line.name for line in panel.lines] == ["data wait", "optimizer", "rest"]
    assert [value for _, value in panel.lines[-1].points] == [7.0, 0.0]


def test_large_memory_is_in_gib_and_of_device_and_host_apart():
    panels = panels_of(run(memory__peak_mib=points(1024, 16384), memory__host_rss_mib=points(100, 200)))
    assert [(each.title, each.unit.split(",")[0]) for each in panels] == [
        ("Memory of the device", "GiB"),
        ("Memory of the host", "MiB"),
    ]
    assert [value for _, value in panels[0].lines[0].points] == [1.0, 16.0]
    assert [line.name for panel in panels for line in panel.lines] == ["peak", "in use now"]


def test_what_is_not_finite_is_a_note():
    record = Record(Path("run"), {"loss": points(1, 2)}, {"loss": [3, 4, 5, 6]})
    assert panels_of(record)[0].notes == ["train is not finite at iteration 3, 4, 5 and 1 more"]


def test_runs_are_compared_by_series_with_a_line_for_each():
    one = run(grad_norm=points(1, 2), loss=points(1, 2), lr=points(1, 2), lr__0=points(1, 2), val__loss=points(1, 2))
    other = run(loss=points(2, 3), val__loss=points(2, 2))
    panels = compared_panels([one, other], ["a", "b"])
    assert titles(panels) == ["loss", "val/loss", "lr", "grad_norm"]
    assert [line.name for line in panels[0].lines] == ["a", "b"] and [line.mark for line in panels[0].lines] == [0, 1]
    assert [line.name for line in panels[2].lines] == ["a"]
