"""The overhead benchmark compares equal work: same weights, same log lines, same handlers. Counts, never times."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import pytest
import torch
from ignite.engine import Engine

from benchmarks import overhead
from benchmarks.contenders import CONTENDERS
from benchmarks.contenders.ignite_engines import add_quiet_handlers
from benchmarks.ratios import TARGETS, Ratio, Target, ratio_of_medians
from benchmarks.rounds import Measured
from benchmarks.workload import ACCUMULATION, HANDLER_PERIOD, LOG_EVERY, Workload, build, weights_digest

EPOCHS = 2


def run(setting: str, name: str) -> Workload:
    work = build(LOG_EVERY, EPOCHS)
    CONTENDERS[setting][name](work)
    return work


@pytest.fixture(scope="module")
def plain() -> dict[str, Workload]:
    return {setting: run(setting, "plain") for setting in CONTENDERS}


CASES = [(setting, name) for setting, contenders in CONTENDERS.items() for name in contenders if name != "plain"]


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "name"), CASES)
def test_contender_ends_with_the_weights_of_the_plain_loop(plain: dict[str, Workload], setting: str, name: str) -> None:
    work = run(setting, name)
    assert weights_digest(work.model) == weights_digest(plain[setting].model)
    assert steps_of(work) == steps_of(plain[setting])


@pytest.mark.parametrize("name", [name for name in CONTENDERS["full"] if name != "plain"])
def test_contender_logs_the_losses_of_the_plain_loop(plain: dict[str, Workload], name: str) -> None:
    lines, expected = run("full", name).log, plain["full"].log
    assert len(lines) == len(expected) == EPOCHS
    for line, other in zip(lines, expected, strict=True):
        assert math.isclose(line, other, rel_tol=1e-5)  # the means are summed in another order


def test_plain_loops_step_as_often_as_their_setting_says(plain: dict[str, Workload]) -> None:
    assert steps_of(plain["bare"]) == EPOCHS * LOG_EVERY
    assert steps_of(plain["full"]) == EPOCHS * LOG_EVERY // ACCUMULATION


@pytest.mark.slow
def test_full_setting_clips_some_updates_and_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def recorded(parameters: object, max_norm: float) -> torch.Tensor:
        norm = clip(parameters, max_norm)  # type: ignore[arg-type]  # an iterable of parameters
        norms.append(norm.item())
        return norm

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", recorded)
    work = build(20 * LOG_EVERY, 1)
    CONTENDERS["full"]["plain"](work)
    assert min(norms) < 1.0 < max(norms)


def test_untrained_weights_have_another_digest(plain: dict[str, Workload]) -> None:
    assert weights_digest(build(LOG_EVERY, EPOCHS).model) != weights_digest(plain["bare"].model)


@pytest.mark.parametrize("micro_batches_per_update", [1, ACCUMULATION])
def test_quiet_handlers_fire_at_the_same_updates(
    monkeypatch: pytest.MonkeyPatch, micro_batches_per_update: int
) -> None:
    fired: list[int] = []
    trainer = Engine(lambda engine, batch: None)
    monkeypatch.setattr(
        "benchmarks.contenders.ignite_engines.quiet",
        lambda: fired.append(trainer.state.iteration // micro_batches_per_update),
    )
    add_quiet_handlers(trainer, 10, micro_batches_per_update)
    trainer.run([None] * ((2 * HANDLER_PERIOD - 1) * micro_batches_per_update))
    assert fired == list(range(HANDLER_PERIOD, HANDLER_PERIOD + 10))


def test_unequal_weights_or_log_lines_are_not_equal_work() -> None:
    same = [Measured("bare", name, [1.0], "a", 0) for name in ("plain", "ours")]
    assert overhead.equal_work(same, "bare")
    assert not overhead.equal_work([*same, Measured("bare", "wrong", [1.0], "b", 0)], "bare")
    assert not overhead.equal_work([*same, Measured("bare", "silent", [1.0], "a", 1)], "bare")
    assert overhead.equal_work([*same, Measured("full", "plain", [1.0], "b", 0)], "bare")


def test_unequal_work_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(contenders: object, micro_batches: int, rounds: int) -> list[Measured]:
        return [Measured("bare", "plain", [1.0] * rounds, "a", 0), Measured("bare", "ours", [1.0] * rounds, "b", 0)]

    monkeypatch.setattr(overhead, "measure", measured)
    assert overhead.main(["--settings", "bare"]) == 1


@pytest.mark.slow
def test_command_measures_in_processes_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")  # they need not import torch again
    monkeypatch.setattr("benchmarks.rounds.multiprocessing.get_context", lambda method: fork)
    path = tmp_path / "overhead.json"
    arguments = ["--quick", "--rounds", "2", "--settings", "full", "--contenders", "plain,cheapest", "--processes", "2"]
    assert overhead.main([*arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [result["name"] for result in report["results"]] == ["plain", "cheapest"]
    assert all(len(result["cpu_us"]) == 2 * 2 and min(result["cpu_us"]) > 0 for result in report["results"])
    assert report["equal_work"] == {"full": True}
    assert report["targets"] == []


def test_ratio_of_medians_and_its_interval() -> None:
    exact = ratio_of_medians([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert exact == Ratio(2.0, 2.0, 2.0)  # every drawn set of pairs has the same ratio
    loose = ratio_of_medians([1.0, 2.0, 9.0, 2.0], [1.0, 1.0, 1.0, 2.0])
    assert loose.low < loose.value < loose.high
    with pytest.raises(ValueError, match="same number of rounds"):
        ratio_of_medians([1.0], [1.0, 2.0])


def test_interval_is_wider_where_processes_differ() -> None:
    own = [1.0, 1.01, 1.0, 1.02, 1.0, 1.2, 1.21, 1.2, 1.22, 1.2]
    narrow, wide = (ratio_of_medians(own, [1.0] * 10, processes=processes) for processes in (1, 2))
    assert narrow.value == wide.value
    assert wide.high > narrow.high
    assert ratio_of_medians([1.0] * 4 + [2.0] * 2, [1.0] * 6, processes=3).high == 2.0


def test_target_is_met_missed_or_within_its_limit() -> None:
    target = Target("full", "ours", "plain", goal=0.88, limit=0.92)
    verdicts = [target.verdict(Ratio(value, 0.0, 2.0)) for value in (0.88, 0.9, 0.93)]
    assert verdicts == ["met", "within the limit", "missed"]
    assert {(target.setting, target.contender) for target in TARGETS} <= {
        (setting, name) for setting, names in CONTENDERS.items() for name in names
    }


def steps_of(work: Workload) -> int:
    return int(next(iter(work.optimizer.state.values()))["step"])
