"""From figures to a sentence: each cause at its threshold, silence below it."""

from __future__ import annotations

from typing import Any

import pytest

from ignite_engine.report.goodput import Figures, Growth, no_cause, verdict

HEALTHY = {"data_wait": 5.0, "copy": 0.5, "forward": 35.0, "backward": 45.0, "optimizer": 8.0, "evaluation": 4.0}
HEALTHY |= {"checkpoint": 1.0, "handlers": 1.0, "logging": 0.5}


def figures(seconds: dict[str, float] | None = None, **values: Any) -> Figures:
    own: dict[str, Any] = {"steps": 1000, "cores": 8, "threads": 8, "workers": 2, "evaluations": 5, "saves": 5}
    return Figures(seconds=HEALTHY | (seconds or {}), **(own | values))


def test_a_run_without_a_cause_is_one_line_that_says_where_its_time_went() -> None:
    assert verdict(figures()) is None
    assert no_cause(figures()) == (
        "Nothing stands out that slowed the run: of its time training 88 %, waiting for data 5 %."
    )
    assert no_cause(figures(steps=19)) is None and no_cause(figures({key: 0.001 for key in HEALTHY})) is None


def ranks(*forward: float) -> list[dict[str, float]]:
    slowest = max(forward)
    return [
        {"data_wait": 5.0, "forward": each, "backward": 45.0, "reduction": slowest - each + 1.0} for each in forward
    ]


def waiting_in_forward() -> list[dict[str, float]]:
    """The others wait there for rank 1, whose data come late."""
    parts = {"data_wait": 0.0, "forward": 60.0, "backward": 45.0, "reduction": 1.0}
    return [parts, parts | {"data_wait": 50.0, "forward": 10.0}, parts]


@pytest.mark.parametrize(
    ("given", "cause", "said"),
    [
        (figures({"data_wait": 50.0}), "data", "data.num_workers=4"),
        (figures({"data_wait": 50.0}, workers=0), "data", "with num_workers=0; set data.num_workers=2"),
        (figures({"data_wait": 50.0}, workers=8), "data", "do less work for each sample"),
        (figures({"data_wait": 50.0}, workers=None), "data", "make the loader faster"),
        (
            figures({"data_wait": 50.0}, workers=0, in_memory=True),
            "data",
            "__getitems__(indices) that returns a whole batch",
        ),
        (figures({"data_wait": 50.0}, in_memory=True), "data", "it is in memory; set data.num_workers=0"),
        (
            figures({"data_wait": 50.0}, workers=8, opening_s=26.0),
            "data",
            "where its 8 workers start anew; set data.persistent_workers=true",
        ),
        (figures({"data_wait": 50.0}, opening_s=24.0), "data", "data.num_workers=4"),
        (figures({"data_wait": 50.0}, opening_s=26.0, persistent=True), "data", "data.num_workers=4"),
        (figures({"logging": 20.0}, handlers=[]), "logging", "it took 17 % of the time, 20 ms an iteration; set logg"),
        (figures({"logging": 20.0, "handlers": 30.0}, handlers=["mine"]), "handlers", "attach them (mine)"),
        (figures(busy_s=60.0), "waiting", "slept 29 % of the time, 28.5 ms an iteration, within the updates; look for"),
        (figures({"handlers": 20.0}, handlers=["mine"]), "handlers", "attach them (mine) to rarer events"),
        (figures(crowded_s=60.0), "busy cores", "was ready 60 % of the time and had no core to run on"),
        (
            figures(longest_step_s=40.0, longest_step_at=512),
            "one iteration",
            "iteration 512 took 40 s, 40 %",
        ),
        (figures({"checkpoint": 30.0}, saves=100), "saving", "set checkpoint.every=200, or checkpoint.background=true"),
        (figures({"checkpoint": 30.0}, background=True), "saving", "one about every 200 iterations"),
        (figures({"evaluation": 120.0}, evaluations=100), "evaluation", "evaluation.limit"),
        (figures({"handlers": 20.0}), "handlers", "every=100"),
        (figures({"logging": 20.0}, sinks={"clearml": 19.0, "jsonl": 0.5}), "logging", "'clearml'"),
        (figures(ranks=ranks(35.0, 35.0, 70.0, 35.0)), "rank 2", "the forward"),
        (
            figures(ranks=waiting_in_forward(), waits_in_forward=True),
            "rank 1",
            "95 ms an iteration without the forward where the others take 45 ms and wait for it there; 50 ms of that "
            "in waiting for data; look at that rank's disk",
        ),
        (figures(ranks=ranks(35.0, 35.0, 70.0, 35.0), waits_in_forward=True), "rank 2", "35 ms of that in the forward"),
        (figures({"data_wait": 50.0}, detects_anomalies=True), "anomaly detection", "set_detect_anomaly is on"),
        (figures(threads=8, local_ranks=2), "too many threads", "run.threads=4"),
        (figures(threads=16, cores=2), "too many threads", "16 threads on 2 cores"),
        (figures(stalled_s=20.0), "memory", "20 % of the time"),
        (figures(swapped_mib=900.0), "memory", "900 MiB"),
        (figures(retries=200, device="cuda"), "the device's memory", "200 times in 1,000"),
        (
            figures(growth=Growth(500, 200.0, 900.0), headroom_mib=3000.0),
            "a memory leak",
            "grew steadily, 400 MiB in 1,000 iterations, to 900 MiB, and the 3,000 MiB that are left are full in 7,500 "
            "iterations; look for what is kept",
        ),
        (
            figures({"data_wait": 50.0}, growth=Growth(500, 100.0, 9000.0, in_first_pass=True), headroom_mib=900.0),
            "a memory leak",
            "full in 4,500 iterations",
        ),
        (figures(caught_up=0.95, device="cuda"), "the host", "larger batch"),
        (figures({"data_wait": 50.0}, steps=1_000_000, p50_ms=0.12), "tiny batches", "data.batch_size"),
        (figures(wasted_s=400.0, wall_s=1000.0), "saving too seldom", "40 %"),
    ],
)
def test_cause_evidence_and_remedy(given: Figures, cause: str, said: str) -> None:
    found = verdict(given)
    assert found is not None
    assert found.cause == cause
    assert said in str(found)
    assert str(found).count(".") == str(found).rstrip(".").count(".") + 1 and "\n" not in str(found)


@pytest.mark.parametrize(
    "given",
    [
        figures(),
        figures({"data_wait": 15.0}),
        figures({"checkpoint": 50.0}, saves=2),
        figures({"data_wait": 50.0, "handlers": 30.0}, steps=200_000),  # of steps that are short themselves
        figures({"evaluation": 40.0}),
        figures({"evaluation": 120.0}, evaluations=1),
        figures({"handlers": 20.0}, handlers=[]),
        figures({"handlers": 20.0}, handlers=["mine"], longest_handlers_s=19.0),
        figures(crowded_s=10.0, longest_step_s=5.0),
        figures(busy_s=75.0),
        figures(busy_s=60.0, crowded_s=6.0),  # for other threads, which had no core
        figures(busy_s=60.0, device="cuda", p50_ms=20.0),
        figures(busy_s=60.0, ranks=ranks(35.0, 35.0)),
        figures(ranks=ranks(35.0, 36.0)),
        figures(ranks=waiting_in_forward()),
        figures(device="cuda", caught_up=0.3, threads=64),
        figures(growth=Growth(500, 40.0, 300.0), headroom_mib=100.0),
        figures(growth=Growth(500, 100.0, 9000.0), headroom_mib=90_000.0),
        figures(growth=Growth(500, 500.0, 900.0, in_first_pass=True), headroom_mib=90_000.0),
        figures(wasted_s=50.0, wall_s=1000.0),
        figures({"data_wait": 50.0}, steps=10),
        Figures(1000, {"data_wait": 3.0, "forward": 1.0}),
        Figures(0, {}),
    ],
)
def test_silent_where_nothing_is_wrong_or_too_little_was_measured(given: Figures) -> None:
    assert verdict(given) is None


def test_workers_and_saves_in_the_background_are_not_advised_where_they_are_there_or_slower() -> None:
    in_memory = verdict(figures({"data_wait": 50.0}, workers=0, in_memory=True))
    background = verdict(figures({"checkpoint": 30.0}, background=True))
    assert in_memory is not None and "num_workers" not in in_memory.remedy
    assert background is not None and "background" not in background.remedy


def test_what_costs_most_is_named() -> None:
    leak = Growth(500, 200.0, 900.0)
    found = verdict(figures({"data_wait": 60.0}, growth=leak, headroom_mib=90_000.0))
    assert found is not None and found.cause == "data"
    found = verdict(figures({"data_wait": 60.0, "checkpoint": 40.0}))
    assert found is not None and found.cause == "data"
    found = verdict(figures({"data_wait": 60.0, "checkpoint": 90.0}))
    assert found is not None and found.cause == "saving"


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (figures({"data_wait": 200.0}, workers=0, crowded_s=120.0), "data"),
        (figures({"handlers": 200.0}, handlers=["mine"], crowded_s=120.0), "handlers"),
        (figures({"checkpoint": 200.0}, saves=100, crowded_s=120.0), "saving"),
        (figures({"evaluation": 200.0}, evaluations=100, crowded_s=120.0), "evaluation"),
        (figures({"handlers": 40.0}, handlers=["mine"], crowded_s=60.0), "busy cores"),  # which cost more
        (figures({"data_wait": 200.0}, crowded_s=120.0), "busy cores"),  # the workers had no core either
        (figures({"data_wait": 50.0, "handlers": 60.0}, workers=0, crowded_s=60.0), "handlers"),
    ],
)
def test_work_of_the_training_thread_that_costs_more_than_busy_cores_is_named_before_them(
    given: Figures, cause: str
) -> None:
    found = verdict(given)
    assert found is not None and found.cause == cause


def test_leak_that_fills_the_memory_within_an_hour_is_named_first() -> None:
    for other in ({"data_wait": 60.0}, {"handlers": 60.0}):
        found = verdict(figures(other, growth=Growth(500, 200.0, 900.0), headroom_mib=8000.0))
        assert found is not None and found.cause == "a memory leak"
    found = verdict(figures(crowded_s=60.0, growth=Growth(500, 200.0, 900.0), headroom_mib=8000.0))
    assert found is not None and found.cause == "a memory leak"
    cache = Growth(500, 200.0, 900.0, in_first_pass=True)  # it may be full at the end of the pass
    found = verdict(figures({"data_wait": 60.0}, growth=cache, headroom_mib=8000.0))
    assert found is not None and found.cause == "data"
