"""The script that reports to ClearML: what it drops of an offline session that is continued."""

import json

from ignite_engine.handlers.clearml.session import drop_later_points, series_of


def point(name, iteration):
    title, _, series = name.partition("/")
    return {"metric": title, "variant": series or title, "iter": iteration, "value": 1.0}


def test_name_of_a_point_is_the_one_that_was_reported():
    assert [series_of(point(name, 1)) for name in ("loss", "val/loss", "a/b/c")] == ["loss", "val/loss", "a/b/c"]


def test_points_after_the_saved_ones_are_dropped_series_by_series(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written = [
        [point("loss", 1), point("val/loss", 1)],
        [point("loss", 2), point("val/loss", 2)],
        [point("loss", 3), point("new", 3)],
    ]
    path.write_text(
        "".join(json.dumps(events) + "\n" for events in written) + '[{"metric": "lo'
    )  # killed while writing
    drop_later_points(path, {"loss": 2, "val/loss": 1})

    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == [[point("loss", 1), point("val/loss", 1)], [point("loss", 2)]]
    assert list(tmp_path.iterdir()) == [path]


def test_session_without_points_stays_without(tmp_path):
    drop_later_points(tmp_path / "metrics.jsonl", {"loss": 2})

    assert list(tmp_path.iterdir()) == []
